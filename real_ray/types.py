"""One immutable type per stage of a rollout, in the order in which the data flows.

Shapes are in comments: ``T`` is the number of completion tokens, ``P`` of prompt tokens.
Token arrays travel inside `SampledGroup` and `RolloutGroup`, between actors. The driver only
sees the small `*Ticket` types: metadata and an opaque reference to the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from real_ray.errors import GroupError

FinishReason = Literal["stop", "length"]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as it is drawn from the dataset.

    Example: ``Prompt(uid="arithmetic:17@0", text="Compute 8 + 9.", token_ids=ids, answer="17")``
    """

    uid: str  # unique for the whole run: "<source>:<row>@<epoch>"
    text: str  # after the chat template, what `token_ids` decode to
    token_ids: IntArray  # [P]
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict)  # all columns of the dataset row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are sampled. ``temperature == 0`` is greedy.

    Example: ``Sampling(n=8, temperature=0.6, max_tokens=12)``
    """

    n: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) were sampled by the policy of ``version``.

    Example: ``VersionSpan(version=3, start=0, end=15)``
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion, exactly as the engine returned it (never decoded and re-encoded).

    Example: ``Completion(index=0, token_ids=ids, generator_logprobs=lp, spans=(VersionSpan(...),),
    text="17", finish_reason="stop")``
    """

    index: int  # 0 .. num_generations - 1
    token_ids: IntArray  # [T]
    generator_logprobs: FloatArray  # [T], of the sampled (temperature-scaled) distribution
    spans: tuple[VersionSpan, ...]  # cover 0 .. T without gaps
    text: str
    finish_reason: FinishReason

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of the tokens."""
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled any of the tokens."""
        return max(span.version for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """All completions of one prompt, from one request to one generator.

    Raises:
        GroupError: the completions are not exactly ``num_generations`` members with distinct
            indices 0 .. num_generations - 1, in order; or the version spans of one do not cover
            its tokens, so that its staleness is unknown.
    """

    prompt: Prompt
    num_generations: int
    completions: tuple[Completion, ...]  # ordered by index

    def __post_init__(self) -> None:
        check_whole_group(
            self.prompt.uid, [c.index for c in self.completions], self.num_generations
        )
        for completion in self.completions:
            _check_spans(self.prompt.uid, completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """A scored group: what the learner trains on.

    Example: ``RolloutGroup(sampled=group, rewards=np.array([1, 0], np.float32))``
    """

    sampled: SampledGroup
    rewards: FloatArray  # [num_generations], in the order of the completions

    def __post_init__(self) -> None:
        if self.rewards.shape != (self.sampled.num_generations,):
            raise GroupError(
                f"group {self.uid}: {self.rewards.shape} rewards for "
                f"{self.sampled.num_generations} completions"
            )

    @property
    def uid(self) -> str:
        return self.sampled.prompt.uid


def check_whole_group(uid: str, indices: Sequence[int], num_generations: int) -> None:
    """Refuse anything but one whole group (a cut group has a wrong loss and no other symptom).

    Raises:
        GroupError: naming the group and the members that are missing, repeated or surplus.
    """
    if list(indices) == list(range(num_generations)):
        return
    missing = sorted(set(range(num_generations)) - set(indices))
    repeated = sorted({i for i in indices if list(indices).count(i) > 1})
    surplus = sorted(set(indices) - set(range(num_generations)))
    if not (missing or repeated or surplus):
        raise GroupError(f"group {uid}: members are out of order: {list(indices)}")
    raise GroupError(
        f"group {uid} is not whole: expected members 0 to {num_generations - 1}, got "
        f"{len(indices)} (missing {missing}, repeated {repeated}, surplus {surplus})"
    )


def _check_spans(uid: str, completion: Completion) -> None:
    bounds = [0]
    for span in completion.spans:
        bounds += (span.start, span.end)
    bounds.append(len(completion.token_ids))
    if bounds != sorted(bounds) or bounds[::2] != bounds[1::2]:
        raise GroupError(
            f"group {uid}, member {completion.index}: version spans "
            f"{[(span.start, span.end) for span in completion.spans]} do not cover its "
            f"{len(completion.token_ids)} tokens one after another"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTicket:
    """What the driver knows of a `SampledGroup`; ``ref`` leads to the group itself.

    Example: ``SampledTicket(uid="arithmetic:17@0", prompt_tokens=34, completion_tokens=(3, 2),
    truncated=(False, False), oldest_version=3, newest_version=4, seconds=1.9,
    generator="generator-0", ref=ref)``
    """

    uid: str
    prompt_tokens: int
    completion_tokens: tuple[int, ...]  # of each member
    truncated: tuple[bool, ...]  # members that ended by length
    oldest_version: int
    newest_version: int
    seconds: float  # from request to last token
    generator: str
    ref: Any

    @property
    def num_members(self) -> int:
        return len(self.completion_tokens)

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all members."""
        return sum(self.completion_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTicket:
    """What the driver knows of a `RolloutGroup`; ``ref`` leads to the group itself."""

    sampled: SampledTicket
    rewards: tuple[float, ...]
    seconds: float  # spent scoring
    ref: Any

    @property
    def uid(self) -> str:
        return self.sampled.uid


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One completion as it was trained on, for people to read.

    Example: ``SampleRecord(uid="arithmetic:17@0", index=0, prompt="...", completion="17",
    answer="17", reward=1.0, label=1, score=0.02, weight=-0.4, oldest_version=3,
    newest_version=4, num_tokens=2, finish_reason="stop")``
    """

    uid: str
    index: int
    prompt: str
    completion: str
    answer: str
    reward: float
    label: int | None  # 1 positive, 0 negative, None: excluded from its group
    score: float  # REAL's s: mean log-ratio of the completion tokens
    weight: float  # dL/ds
    oldest_version: int
    newest_version: int
    num_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Outcome of training on one batch. ``metrics`` use the names of docs/metrics.md."""

    policy_version: int
    metrics: Mapping[str, float]
    samples: tuple[SampleRecord, ...]
    warnings: tuple[str, ...] = ()  # what a user should know, such as a step that was skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Outcome of one weight sync to all generators.

    Example: ``SyncReport(policy_version=4, seconds=0.9, pause_seconds=0.8, num_generators=2,
    num_tensors=272, num_bytes=269_000_000, probe_difference=0.011)``
    """

    policy_version: int
    seconds: float
    pause_seconds: float  # longest pause of a generator
    num_generators: int  # that hold the weights now
    num_tensors: int
    num_bytes: int
    probe_difference: float  # mean |logprob difference| on the probe, worst generator
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds: gather, transfer, ...
