"""Plans of optimiser steps, and what groups are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from groups import make_group, shape_of
from hypothesis import given
from hypothesis import strategies as st

from real_ray.batching import (
    GroupShape,
    Layout,
    Slice,
    StepPlan,
    check_groups,
    num_tokens,
    plan_step,
)
from real_ray.errors import GroupError
from real_ray.policy import lay_out
from real_ray.types import RolloutGroup

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def shape(prompt: int, *completions: int, uid: str = "g") -> GroupShape:
    return GroupShape(uid=uid, prompt_tokens=prompt, completion_tokens=completions)


steps = st.lists(
    st.builds(
        GroupShape,
        uid=st.uuids().map(str),
        prompt_tokens=st.integers(1, 60),
        completion_tokens=st.lists(st.integers(1, 60), min_size=1, max_size=8).map(tuple),
    ),
    max_size=12,
)
ranks = st.integers(1, 5)
layouts = st.sampled_from(LAYOUTS)
budgets = st.integers(120, 1500)  # a sequence has at most 119 tokens that are run


def parts_of(plan: StepPlan) -> list[tuple[int, int, Slice]]:
    """(rank, micro-batch of the rank, slice)."""
    return [
        (rank, index, part)
        for rank, microbatches in enumerate(plan.ranks)
        for index, microbatch in enumerate(microbatches)
        for part in microbatch
    ]


class TestPlanStep:
    @given(steps, ranks, budgets, layouts)
    def test_every_member_runs_once_within_the_budget_and_in_lockstep(
        self, shapes: list[GroupShape], num_ranks: int, max_tokens: int, layout: Layout
    ) -> None:
        plan = plan_step(shapes, num_ranks=num_ranks, max_tokens=max_tokens, layout=layout)
        members = [(part.group, m) for _, _, part in parts_of(plan) for m in part.members]
        assert sorted(members) == [(g, m) for g, s in enumerate(shapes) for m in s.members]
        assert len(plan.ranks) == num_ranks
        assert len({len(microbatches) for microbatches in plan.ranks}) == 1
        for microbatches in plan.ranks:
            tokens = [num_tokens(microbatch, shapes, layout) for microbatch in microbatches]
            assert max(tokens, default=0) <= max_tokens
            assert tokens == sorted(tokens, reverse=True), "the largest does not run first"
        for _, _, part in parts_of(plan):
            assert part.members == tuple(sorted(part.members))
        again = plan_step(shapes, num_ranks=num_ranks, max_tokens=max_tokens, layout=layout)
        assert again == plan

    @given(steps, ranks, budgets, layouts)
    def test_cut_groups_and_the_passes_for_their_scores(
        self, shapes: list[GroupShape], num_ranks: int, max_tokens: int, layout: Layout
    ) -> None:
        plan = plan_step(shapes, num_ranks=num_ranks, max_tokens=max_tokens, layout=layout)
        places: dict[int, set[tuple[int, int]]] = {}
        for rank, index, part in parts_of(plan):
            places.setdefault(part.group, set()).add((rank, index))
        assert plan.cut == {group for group, found in places.items() if len(found) > 1}

        passes = [plan.score_passes(rank) for rank in range(num_ranks)]
        assert len({len(microbatches) for microbatches in passes}) == 1
        for rank, microbatches in enumerate(passes):
            run = [microbatch for microbatch in microbatches if microbatch]
            assert run == [
                microbatch
                for microbatch in plan.ranks[rank][1:]  # the first keeps its graph
                if any(part.group in plan.cut for part in microbatch)
            ]
        if not plan.cut:
            assert passes == [()] * num_ranks

    @given(steps, layouts)
    def test_what_fits_one_microbatch_is_one(
        self, shapes: list[GroupShape], layout: Layout
    ) -> None:
        everything = tuple(Slice(group=g, members=s.members) for g, s in enumerate(shapes))
        tokens = num_tokens(everything, shapes, layout)
        plan = plan_step(shapes, num_ranks=1, max_tokens=max(tokens, 1), layout=layout)
        assert plan.ranks == (((everything,) if shapes else ()),)
        assert plan.cut == frozenset()

    @given(steps, ranks, st.sampled_from(("packed", "shared_prefix")))
    def test_no_rank_is_far_ahead(
        self, shapes: list[GroupShape], num_ranks: int, layout: Layout
    ) -> None:
        """Largest load <= 4/3 (mean + longest sequence), prompts counted once a completion."""
        plan = plan_step(shapes, num_ranks=num_ranks, max_tokens=10**6, layout=layout)
        lengths = [s.prompt_tokens + c for s in shapes for c in s.completion_tokens]
        loads = [sum(num_tokens(m, shapes, layout) for m in rank) for rank in plan.ranks]
        assert max(loads) <= 4 / 3 * (sum(lengths) / num_ranks + max(lengths, default=0))

    @given(steps.filter(bool), ranks, layouts, st.integers(0, 2))
    def test_no_plan_hides_a_sequence_that_is_too_long(
        self, shapes: list[GroupShape], num_ranks: int, layout: Layout, short_of: int
    ) -> None:
        longest = max(s.prompt_tokens + max(s.completion_tokens) - 1 for s in shapes)
        max_tokens = max(longest - short_of, 1)
        if max_tokens >= longest:
            plan_step(shapes, num_ranks=num_ranks, max_tokens=max_tokens, layout=layout)
            return
        with pytest.raises(GroupError, match=rf"tokens are above .* = {max_tokens}, ") as caught:
            plan_step(shapes, num_ranks=num_ranks, max_tokens=max_tokens, layout=layout)
        too_long = {
            f"group {s.uid}, member {m}: {s.prompt_tokens + c - 1} tokens"
            for s in shapes
            for m, c in enumerate(s.completion_tokens)
            if s.prompt_tokens + c - 1 > max_tokens
        }
        assert str(caught.value).partition(" are above")[0] in too_long

    @each_layout
    def test_a_sequence_that_is_too_long_is_named(self, layout: Layout) -> None:
        shapes = [shape(4, 2, 2), shape(10, 3, 92, uid="sums:7@0")]
        message = r"^group sums:7@0, member 1: 101 tokens are above learner\.max_tokens_per_.* 100,"
        with pytest.raises(GroupError, match=message):
            plan_step(shapes, num_ranks=1, max_tokens=100, layout=layout)
        plan_step(shapes, num_ranks=1, max_tokens=101, layout=layout)

    @each_layout
    def test_fewer_groups_than_ranks_are_cut(self, layout: Layout) -> None:
        plan = plan_step([shape(2, *[20] * 6)], num_ranks=3, max_tokens=1000, layout=layout)
        assert plan.ranks == tuple(
            ((Slice(group=0, members=members),),) for members in [(0, 1), (2, 3), (4, 5)]
        )
        assert plan.cut == {0}
        assert [plan.score_passes(rank) for rank in range(3)] == [()] * 3, "no pass is run twice"

    @each_layout
    def test_more_ranks_than_members_leave_ranks_in_step_without_work(self, layout: Layout) -> None:
        plan = plan_step([shape(2, 20, 20)], num_ranks=5, max_tokens=1000, layout=layout)
        assert sorted(map(len, plan.ranks)) == [1] * 5
        assert Counter(len(microbatch) for (microbatch,) in plan.ranks) == {0: 3, 1: 2}

    def test_a_cut_that_would_only_repeat_a_long_prompt_is_not_made(self) -> None:
        shapes = [shape(1000, 10, 10, 10, 10)]
        shared = plan_step(shapes, num_ranks=2, max_tokens=10_000, layout="shared_prefix")
        assert shared.cut == frozenset()
        packed = plan_step(shapes, num_ranks=2, max_tokens=10_000, layout="packed")
        assert packed.cut == {0}

    def test_groups_are_cut_only_if_that_saves_more_than_the_pass_for_their_scores(self) -> None:
        def cut(length: int) -> frozenset[int]:
            """Two ranks: 8 x 100 and 8 x length whole, or about even."""
            shapes = [shape(1, *[100] * 8), shape(1, *[length] * 8)]
            return plan_step(shapes, num_ranks=2, max_tokens=10_000, layout="packed").cut

        assert cut(60) == frozenset()  # 800 beside 680
        assert cut(10) == {0}  # 800 beside 480

    def test_the_largest_microbatch_runs_first_though_its_sequences_are_shorter(self) -> None:
        shapes = [shape(1, 60), shape(1, 50), shape(1, 50)]
        plan = plan_step(shapes, num_ranks=1, max_tokens=100, layout="packed")
        assert [[part.group for part in m] for m in plan.ranks[0]] == [[1, 2], [0]]

    def test_a_cut_group_keeps_members_of_like_length_together(self) -> None:
        plan = plan_step([shape(1, 9, 90, 9, 90)], num_ranks=1, max_tokens=180, layout="padded")
        assert [[part.members for part in m] for m in plan.ranks[0]] == [[(1, 3)], [(0, 2)]]

    def test_padded_rows_of_like_length_share_a_microbatch(self) -> None:
        shapes = [shape(5, *[5] * 4), shape(5, *[95] * 4), shape(5, *[5] * 4), shape(5, *[95] * 4)]
        plan = plan_step(shapes, num_ranks=1, max_tokens=800, layout="padded")
        assert [[part.group for part in m] for m in plan.ranks[0]] == [[1, 3], [0, 2]]

    @pytest.mark.parametrize(
        ("num_ranks", "max_tokens", "message"),
        [(0, 10, "num_ranks is 0"), (1, 0, "max_tokens is 0")],
    )
    def test_nonsense_is_refused(self, num_ranks: int, max_tokens: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plan_step([], num_ranks=num_ranks, max_tokens=max_tokens, layout="packed")


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(1, 5), min_size=3, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.data(),
    layouts,
)
def test_num_tokens_is_what_a_forward_pass_runs(
    sizes: list[tuple[int, list[int]]], data: st.DataObject, layout: Layout
) -> None:
    groups = [
        make_group(str(g), prompt_length=prompt, lengths=lengths, rewards=[0.0] * 3)
        for g, (prompt, lengths) in enumerate(sizes)
    ]
    chosen = st.sets(st.sampled_from(range(3)), min_size=1).map(sorted).map(tuple)
    microbatch = tuple(Slice(group=g, members=data.draw(chosen)) for g in range(len(groups)))
    inputs, _ = lay_out(
        microbatch,
        dict(enumerate(groups)),
        layout=layout,
        pad_token_id=0,
        device=torch.device("cpu"),
    )
    assert num_tokens(microbatch, [shape_of(g) for g in groups], layout) == inputs.input_ids.numel()


def test_num_tokens_of_known_slices() -> None:
    shapes = [shape(10, 3, 5), shape(4, 1, 20)]
    microbatch = (Slice(group=0, members=(0, 1)), Slice(group=1, members=(1,)))
    assert {layout: num_tokens(microbatch, shapes, layout) for layout in LAYOUTS} == {
        "padded": 3 * (10 + 19),
        "packed": (10 + 2) + (10 + 4) + (4 + 19),
        "shared_prefix": 10 + 2 + 4 + 4 + 19,
    }
    assert [num_tokens((), shapes, layout) for layout in LAYOUTS] == [0, 0, 0]


def group_of(uid: str = "a", *, prompt: int = 2, lengths: Sequence[int] = (1, 2)) -> RolloutGroup:
    return make_group(uid, prompt_length=prompt, lengths=lengths, rewards=[0.0] * len(lengths))


class TestCheckGroups:
    def test_good_groups_pass(self) -> None:
        check_groups([])
        check_groups([group_of("a"), group_of("b", prompt=1, lengths=(7, 1))])

    def test_different_group_sizes_are_refused(self) -> None:
        with pytest.raises(GroupError, match="group b has num_generations 3 but group a has 2"):
            check_groups([group_of("a"), group_of("b", lengths=(1, 1, 1))])

    def test_a_group_cut_after_its_construction_is_refused(self) -> None:
        group = group_of()
        object.__setattr__(group.sampled, "completions", group.sampled.completions[:1])
        with pytest.raises(GroupError, match=r"group a is not whole.*missing \[1\]"):
            check_groups([group])

    def test_the_same_group_twice_is_refused(self) -> None:
        with pytest.raises(GroupError, match="group a comes 2 times"):
            check_groups([group_of(), group_of("b"), group_of()])

    def test_an_empty_completion_is_refused(self) -> None:
        with pytest.raises(GroupError, match="group a, member 1: the completion has no tokens"):
            check_groups([group_of(lengths=(1, 0))])

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(GroupError, match="group a: the prompt has no tokens"):
            check_groups([group_of(prompt=0)])

    def test_missing_logprobs_are_refused(self) -> None:
        group = group_of()
        short = replace(
            group.sampled.completions[1], generator_logprobs=np.zeros(1, dtype=np.float32)
        )
        object.__setattr__(group.sampled, "completions", (group.sampled.completions[0], short))
        with pytest.raises(GroupError, match=r"group a, member 1: \(1,\) generator log-probs for"):
            check_groups([group])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.002])
    def test_unusable_logprobs_are_refused(self, bad: float) -> None:
        group = group_of()
        group.sampled.completions[1].generator_logprobs[1] = bad
        with pytest.raises(GroupError, match=r"group a, member 1: .* log-prob of token 1 is"):
            check_groups([group])

    def test_rounding_above_zero_is_accepted(self) -> None:
        group = group_of()
        group.sampled.completions[1].generator_logprobs[1] = 0.0005
        check_groups([group])
