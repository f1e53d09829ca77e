"""The driver's state at a checkpoint, and comparison of groups that were kept in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import ray
from groups import ticket_of

from real_ray.checkpoint import BufferedGroup, DriverState
from real_ray.ledger import LedgerState
from real_ray.types import RolloutGroup, Sampling


def driver_state(
    policy_version: int, groups: Mapping[int, RolloutGroup] | None = None
) -> DriverState:
    """A state with these groups buffered, in Ray's object store, by the number of their draw."""
    buffered = tuple(
        BufferedGroup(
            number=number, accepted=True, group=replace(ticket_of(group), ref=ray.put(group))
        )
        for number, group in sorted((groups or {}).items())
    )
    return DriverState(
        policy_version=policy_version,
        prompts="prompts",
        prompts_per_step=2,
        sampling=Sampling(n=2, temperature=0.6, max_tokens=8),
        reward_function="rewards:f",
        ledger=LedgerState(closed_below=3, closed=(5,), outcomes={"trained": 4}),
        num_resampled=1,
        buffered=buffered,
    )


def assert_same_group(got: RolloutGroup, expected: RolloutGroup) -> None:
    """Equal to the bit, but for the dataset columns, which are not kept."""
    assert got.uid == expected.uid
    assert_same_array(got.rewards, expected.rewards)
    mine, other = got.sampled.prompt, expected.sampled.prompt
    assert (mine.text, mine.answer, mine.columns) == (other.text, other.answer, {})
    assert_same_array(mine.token_ids, other.token_ids)
    assert got.sampled.num_generations == expected.sampled.num_generations
    for one, two in zip(got.sampled.completions, expected.sampled.completions, strict=True):
        assert (one.index, one.text, one.finish_reason) == (two.index, two.text, two.finish_reason)
        assert one.spans == two.spans
        assert_same_array(one.token_ids, two.token_ids)
        assert_same_array(one.generator_logprobs, two.generator_logprobs)


def assert_same_array(got: np.ndarray, expected: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()
