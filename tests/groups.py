"""Rollout groups with given sizes and rewards, for tests of the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from real_ray.batching import GroupShape
from real_ray.types import (
    Completion,
    Prompt,
    RolloutGroup,
    RolloutTicket,
    SampledGroup,
    SampledTicket,
    VersionSpan,
)


def make_group(
    uid: str,
    *,
    prompt_length: int,
    lengths: Sequence[int],
    rewards: Sequence[float],
    truncated: Sequence[int] = (),
    vocab_size: int = 99,
    seed: int = 0,
) -> RolloutGroup:
    """Random tokens; generator log-probs of a plausible size; some members ended by length."""
    rng = np.random.default_rng([seed, *uid.encode()])

    def tokens(count: int) -> np.ndarray:
        return rng.integers(4, vocab_size, count).astype(np.int32)

    completions = tuple(
        Completion(
            index=index,
            token_ids=tokens(length),
            generator_logprobs=-rng.uniform(3.0, 6.0, length).astype(np.float32),
            spans=(VersionSpan(version=0, start=0, end=length),),
            text="",
            finish_reason="length" if index in truncated else "stop",
        )
        for index, length in enumerate(lengths)
    )
    prompt = Prompt(uid=uid, text="", token_ids=tokens(prompt_length), answer="")
    return RolloutGroup(
        sampled=SampledGroup(prompt=prompt, num_generations=len(lengths), completions=completions),
        rewards=np.array(rewards, dtype=np.float32),
    )


def ticket_of(group: RolloutGroup) -> RolloutTicket:
    """What the driver would know of the group."""
    completions = group.sampled.completions
    sampled = SampledTicket(
        uid=group.uid,
        prompt_tokens=len(group.sampled.prompt.token_ids),
        completion_tokens=tuple(len(c.token_ids) for c in completions),
        truncated=tuple(c.finish_reason == "length" for c in completions),
        oldest_version=min(c.oldest_version for c in completions),
        newest_version=max(c.newest_version for c in completions),
        seconds=0.0,
        generator="fake",
        ref=None,
    )
    return RolloutTicket(
        sampled=sampled, rewards=tuple(group.rewards.tolist()), seconds=0.0, ref=group
    )


def shape_of(group: RolloutGroup) -> GroupShape:
    """Its size in tokens."""
    return GroupShape(
        uid=group.uid,
        prompt_tokens=len(group.sampled.prompt.token_ids),
        completion_tokens=tuple(len(c.token_ids) for c in group.sampled.completions),
    )
