"""What learner and generators say of the weights of one sync, and whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from real_ray.types import IntArray

_SHOWN = 3  # names of tensors in a message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """A fixed sequence whose completion log-probs tell whether a generator has the right weights.

    Tokens that the policy would itself sample: unlikely ones differ more by rounding.
    """

    token_ids: IntArray  # [prompt + completion]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What the learner sent.

    Example: ``SentWeights(policy_version=3, num_tensors=2, num_bytes=48)``
    """

    policy_version: int
    num_tensors: int
    num_bytes: int
    checksums: Mapping[str, int] = field(default_factory=dict)  # by tensor; empty: none are made
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each part: gather, transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """What a generator says it holds since the last update."""

    policy_version: int
    num_tensors: int
    checksums: Mapping[str, int] = field(default_factory=dict)  # of what was received
    engine_checksum: str = ""  # of what the engine has loaded; empty: `checksums` tell more
    problems: tuple[str, ...] = ()  # that the engine found itself


def what_is_wrong(sent: SentWeights, held: HeldWeights) -> str:
    """How a generator's weights differ from those sent, in words; empty if they do not."""
    wrong = list(held.problems)
    if held.policy_version != sent.policy_version:
        wrong.append(f"version {held.policy_version}")
    if held.num_tensors != sent.num_tensors:
        wrong.append(f"{held.num_tensors} tensors of {sent.num_tensors}")
    if held.checksums and sent.checksums:
        for what, names in (
            ("missing", sent.checksums.keys() - held.checksums.keys()),
            ("not sent", held.checksums.keys() - sent.checksums.keys()),
            (
                "not as sent",
                {n for n, c in held.checksums.items() if sent.checksums.get(n, c) != c},
            ),
        ):
            if names:
                more = " ..." if len(names) > _SHOWN else ""
                wrong.append(f"{what}: {', '.join(sorted(names)[:_SHOWN])}{more}")
    return "; ".join(wrong)


def most_common(checksums: Collection[str]) -> str:
    """The checksum that more than half of the engines have; empty: there is none.

    What an engine has loaded is laid out in its own way, so its checksum can be compared with
    those of other engines alone, and not with the learner. Of two that differ either may be wrong.

    Example: ``most_common(["a", "a", "b"]) == "a"`` and ``most_common(["a", "b"]) == ""``
    """
    for checksum, count in Counter(checksums).most_common(1):
        if 2 * count > len(checksums):
            return checksum
    return ""
