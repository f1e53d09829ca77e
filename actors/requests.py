"""From a batch of groups to what each learner rank is asked to do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol import GroupPosition, OptimiserStep, TrainRequest
from real_ray.batching import GroupShape, Layout, StepPlan, plan_step
from real_ray.config import LearnerConfig, LossConfig
from real_ray.types import RolloutTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """A request to a rank, and the groups of the batch that go with it, by position."""

    request: TrainRequest
    groups: tuple[int, ...]


def layout_of(learner: LearnerConfig) -> Layout:
    """How the learner lays out its micro-batches."""
    if not learner.packing:
        return "padded"
    return "shared_prefix" if learner.share_prefix else "packed"


def rank_work(
    batch: Sequence[RolloutTicket],
    *,
    learner: LearnerConfig,
    loss: LossConfig,
    policy_version: int,
) -> list[RankWork]:
    """Split a batch into optimiser steps, in its order, and each of these over the ranks.

    Steps have equally many groups, or in a smaller last batch of a run one more or less. There are
    `learner.minibatches_per_batch` of them, or fewer rather than one without a group.

    Raises:
        GroupError: a sequence is longer than `learner.max_tokens_per_microbatch`.
    """
    num_parts = min(learner.minibatches_per_batch, len(batch))
    bounds = [part * len(batch) // num_parts for part in range(num_parts + 1)]
    parts = [batch[first:end] for first, end in itertools.pairwise(bounds)]
    plans = [
        plan_step(
            [_shape(group) for group in part],
            num_ranks=learner.num_ranks,
            max_tokens=learner.max_tokens_per_microbatch,
            layout=layout_of(learner),
        )
        for part in parts
    ]
    work = []
    for rank in range(learner.num_ranks):
        positions = [
            GroupPosition(step=step, group=group)
            for step, plan in enumerate(plans)
            for group in sorted({s.group for m in plan.ranks[rank] for s in m})
        ]
        request = TrainRequest(
            policy_version=policy_version,
            steps=tuple(
                _step(part, plan, rank, loss) for part, plan in zip(parts, plans, strict=True)
            ),
            positions=tuple(positions),
        )
        work.append(
            RankWork(request=request, groups=tuple(bounds[p.step] + p.group for p in positions))
        )
    return work


def _step(
    groups: Sequence[RolloutTicket], plan: StepPlan, rank: int, loss: LossConfig
) -> OptimiserStep:
    truncated = np.array([group.sampled.truncated for group in groups], dtype=bool)
    return OptimiserStep(
        microbatches=plan.ranks[rank],
        score_passes=plan.score_passes(rank),
        cut=plan.cut,
        rewards=np.array([group.rewards for group in groups], dtype=np.float32),
        included=~truncated if loss.truncated == "exclude" else np.ones_like(truncated),
        num_tokens=np.array([g.sampled.completion_tokens for g in groups], dtype=np.int64),
    )


def _shape(group: RolloutTicket) -> GroupShape:
    return GroupShape(
        uid=group.uid,
        prompt_tokens=group.sampled.prompt_tokens,
        completion_tokens=group.sampled.completion_tokens,
    )
