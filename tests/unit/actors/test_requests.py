"""What each rank is asked to do with a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from groups import make_group, ticket_of
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol import GroupPosition
from actors.requests import RankWork, layout_of, rank_work
from real_ray.batching import Slice
from real_ray.config import LearnerConfig, LossConfig
from real_ray.errors import GroupError
from real_ray.types import RolloutTicket


def ticket(
    uid: str,
    *,
    prompt: int = 2,
    lengths: Sequence[int] = (3, 4),
    rewards: Sequence[float] = (1.0, 0.0),
    truncated: Sequence[int] = (),
) -> RolloutTicket:
    return ticket_of(
        make_group(uid, prompt_length=prompt, lengths=lengths, rewards=rewards, truncated=truncated)
    )


def work_of(
    batch: Sequence[RolloutTicket], loss: dict[str, Any] | None = None, **learner: Any
) -> list[RankWork]:
    return rank_work(
        batch,
        learner=LearnerConfig(prompts_per_step=len(batch), **learner),
        loss=LossConfig(**(loss or {})),
        policy_version=8,
    )


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, "shared_prefix"),
        ({"share_prefix": False}, "packed"),
        ({"packing": False, "share_prefix": False}, "padded"),
    ],
)
def test_layout(settings: dict[str, Any], layout: str) -> None:
    assert layout_of(LearnerConfig(**settings)) == layout


def test_the_layout_of_the_learner_is_what_is_planned_for() -> None:
    """Two rows of 6 tokens that are run, of which 2 are a prompt they can share: 10."""
    batch = [ticket("a", lengths=(5, 5))]
    budget = {"max_tokens_per_microbatch": 11}
    (shared,) = work_of(batch, **budget)
    assert shared.request.steps[0].cut == frozenset()
    (packed,) = work_of(batch, share_prefix=False, **budget)
    assert packed.request.steps[0].cut == {0}


def test_optimiser_steps_follow_the_order_of_the_batch() -> None:
    batch = [ticket(uid, lengths=(1, n), rewards=(n, 0)) for n, uid in enumerate("abcdef", start=1)]
    (work,) = work_of(batch, minibatches_per_batch=3)
    assert work.request.policy_version == 8
    assert [step.num_tokens.tolist() for step in work.request.steps] == [
        [[1, 1], [1, 2]],
        [[1, 3], [1, 4]],
        [[1, 5], [1, 6]],
    ]
    assert [step.rewards.tolist() for step in work.request.steps] == [
        [[1, 0], [2, 0]],
        [[3, 0], [4, 0]],
        [[5, 0], [6, 0]],
    ]
    assert work.groups == (0, 1, 2, 3, 4, 5)
    assert work.request.positions == tuple(
        GroupPosition(step=step, group=group) for step in range(3) for group in range(2)
    )


@given(
    groups=st.lists(
        st.lists(st.integers(1, 40), min_size=3, max_size=3), min_size=4, max_size=8
    ).filter(lambda groups: len(groups) % 2 == 0),
    num_ranks=st.integers(1, 4),
    budget=st.integers(50, 400),
)
def test_every_rank_gets_the_groups_of_which_it_runs_members(
    groups: list[list[int]], num_ranks: int, budget: int
) -> None:
    batch = [ticket(str(g), lengths=lengths, rewards=(1, 0, g)) for g, lengths in enumerate(groups)]
    work = work_of(
        batch, minibatches_per_batch=2, num_ranks=num_ranks, max_tokens_per_microbatch=budget
    )
    assert len(work) == num_ranks
    members: list[tuple[int, int]] = []
    for its in work:
        assert len(its.groups) == len(set(its.groups)) == len(its.request.positions)
        size = len(batch) // 2
        assert its.groups == tuple(p.step * size + p.group for p in its.request.positions)
        run = {
            step * size + part.group: None
            for step, work_of_step in enumerate(its.request.steps)
            for microbatch in work_of_step.microbatches
            for part in microbatch
        }
        assert set(its.groups) == set(run)
        members += [
            (step * size + part.group, member)
            for step, work_of_step in enumerate(its.request.steps)
            for microbatch in work_of_step.microbatches
            for part in microbatch
            for member in part.members
        ]
    assert sorted(members) == [(g, m) for g in range(len(batch)) for m in range(3)]
    for step in range(2):  # what all ranks do together, or all know
        of_ranks = [its.request.steps[step] for its in work]
        assert len({len(s.microbatches) for s in of_ranks}) == 1
        assert len({len(s.score_passes) for s in of_ranks}) == 1
        assert len({s.cut for s in of_ranks}) == 1
        for s in of_ranks:
            np.testing.assert_array_equal(s.rewards, of_ranks[0].rewards)
            np.testing.assert_array_equal(s.num_tokens, of_ranks[0].num_tokens)
            np.testing.assert_array_equal(s.included, of_ranks[0].included)


@pytest.mark.parametrize(
    ("groups", "minibatches", "sizes"),
    [
        (1, 1, [1]),
        (1, 4, [1]),
        (3, 2, [1, 2]),
        (3, 4, [1, 1, 1]),
        (5, 4, [1, 1, 1, 2]),
        (7, 4, [1, 2, 2, 2]),
        (8, 4, [2, 2, 2, 2]),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_last_batch_that_is_smaller_is_split_evenly_and_whole(
    groups: int, minibatches: int, sizes: list[int], num_ranks: int
) -> None:
    batch = [ticket(str(g), lengths=(g + 1, 1)) for g in range(groups)]
    learner = LearnerConfig(
        prompts_per_step=8, minibatches_per_batch=minibatches, num_ranks=num_ranks
    )
    work = rank_work(batch, learner=learner, loss=LossConfig(), policy_version=8)
    for its in work:
        of_steps = [step.num_tokens[:, 0].tolist() for step in its.request.steps]
        assert [len(step) for step in of_steps] == sizes
        assert sum(of_steps, []) == list(range(1, groups + 1))  # noqa: RUF017
        for position, group in zip(its.request.positions, its.groups, strict=True):
            assert of_steps[position.step][position.group] == group + 1
    assert {group for its in work for group in its.groups} == set(range(groups))


def test_a_group_that_is_cut_over_ranks_goes_to_both() -> None:
    batch = [ticket("a", lengths=(50, 50))]
    work = work_of(batch, num_ranks=2)
    assert [its.groups for its in work] == [(0,), (0,)]
    assert [its.request.positions for its in work] == [(GroupPosition(step=0, group=0),)] * 2
    for member, its in enumerate(work):
        (step,) = its.request.steps
        assert step.microbatches == ((Slice(group=0, members=(member,)),),)
        assert step.score_passes == ()
        assert step.cut == {0}
        assert step.num_tokens.tolist() == [[50, 50]], "a rank knows of all members"


def test_truncated_members_are_left_out_only_if_asked_for() -> None:
    batch = [ticket("a", truncated=(1,)), ticket("b"), ticket("c", truncated=(0, 1))]
    (included,) = work_of(batch)
    assert included.request.steps[0].included.tolist() == [[True, True]] * 3
    (excluded,) = work_of(batch, loss={"truncated": "exclude"})
    assert excluded.request.steps[0].included.tolist() == [
        [True, False],
        [True, True],
        [False, False],
    ]


def test_dtypes_are_those_of_the_loss() -> None:
    (work,) = work_of([ticket("a")])
    step = work.request.steps[0]
    assert (step.rewards.dtype, step.included.dtype, step.num_tokens.dtype) == (
        np.float32,
        np.bool_,
        np.int64,
    )


def test_a_sequence_above_the_budget_is_refused_by_uid() -> None:
    batch = [ticket("a"), ticket("sums:7@0", prompt=60, lengths=(50, 3))]
    with pytest.raises(GroupError, match=r"^group sums:7@0, member 0: 109 tokens are above"):
        work_of(batch, minibatches_per_batch=2, max_tokens_per_microbatch=100)
