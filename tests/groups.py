"""Rollout groups with given sizes and rewards, for tests of the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan


def make_group(
    uid: str,
    *,
    prompt_length: int,
    lengths: Sequence[int],
    rewards: Sequence[float],
    vocab_size: int = 99,
    seed: int = 0,
) -> RolloutGroup:
    """Random tokens; generator log-probs of a plausible size."""
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
            finish_reason="length",
        )
        for index, length in enumerate(lengths)
    )
    prompt = Prompt(uid=uid, text="", token_ids=tokens(prompt_length), answer="")
    return RolloutGroup(
        sampled=SampledGroup(prompt=prompt, num_generations=len(lengths), completions=completions),
        rewards=np.array(rewards, dtype=np.float32),
    )
