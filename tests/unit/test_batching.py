from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_ray.batching import GroupShape, PaddedBatch, assign_to_ranks, collate, plan_microbatches
from real_ray.errors import GroupError
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan

PAD = 99
no_deadline = settings(deadline=None)  # a busy machine is no failure


def make_completion(index: int, tokens: Sequence[int], version: int = 0) -> Completion:
    half = (len(tokens) + 1) // 2
    return Completion(
        index=index,
        token_ids=np.array(tokens, dtype=np.int32),
        generator_logprobs=np.arange(-1, -len(tokens) - 1, -1, dtype=np.float32) / np.float32(8),
        spans=(
            VersionSpan(version=version, start=0, end=half),
            VersionSpan(version=version + 1, start=half, end=len(tokens)),
        ),
        text="",
        finish_reason="stop",
    )


def make_group(uid: str, prompt: Sequence[int], completions: Sequence[Completion]) -> RolloutGroup:
    return RolloutGroup(
        sampled=SampledGroup(
            prompt=Prompt(uid=uid, text="", token_ids=np.array(prompt, dtype=np.int32), answer=""),
            num_generations=len(completions),
            completions=tuple(completions),
        ),
        rewards=np.arange(len(completions), dtype=np.float32),
    )


def token_group(uid: str, prompt: Sequence[int], *tokens: Sequence[int]) -> RolloutGroup:
    return make_group(uid, prompt, [make_completion(i, t) for i, t in enumerate(tokens)])


class TestAssignToRanks:
    @no_deadline
    @given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 6))
    def test_every_group_once_in_order(self, tokens: list[int], num_ranks: int) -> None:
        ranks = assign_to_ranks(tokens, num_ranks)
        assert len(ranks) == num_ranks
        assert sorted(i for rank in ranks for i in rank) == list(range(len(tokens)))
        assert all(rank == sorted(rank) for rank in ranks)
        assert ranks == assign_to_ranks(tokens, num_ranks)

    @no_deadline
    @given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 6))
    def test_no_rank_is_ahead_by_more_than_one_group(
        self, tokens: list[int], num_ranks: int
    ) -> None:
        loads = [sum(tokens[i] for i in rank) for rank in assign_to_ranks(tokens, num_ranks)]
        assert max(loads) - min(loads) <= max(tokens)

    @no_deadline
    @given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 6))
    def test_no_rank_is_empty_without_need(self, tokens: list[int], num_ranks: int) -> None:
        busy = [rank for rank in assign_to_ranks(tokens, num_ranks) if rank]
        assert len(busy) == min(len(tokens), num_ranks)

    def test_large_groups_are_balanced_by_small_ones(self) -> None:
        assert assign_to_ranks([10, 60, 20, 30, 20, 60], 2) == [[0, 1, 3], [2, 4, 5]]  # 100 each

    def test_no_ranks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="num_ranks is 0"):
            assign_to_ranks([1], 0)


shapes = st.builds(
    GroupShape,
    num_members=st.just(4),
    prompt_tokens=st.integers(1, 50),
    completion_tokens=st.integers(1, 50),
)


def padded_tokens(shapes: Sequence[GroupShape]) -> int:
    width = max(s.prompt_tokens for s in shapes) + max(s.completion_tokens for s in shapes)
    return int(sum(s.num_members for s in shapes) * width)


class TestPlanMicrobatches:
    @no_deadline
    @given(st.lists(shapes, max_size=15), st.integers(1, 2000))
    def test_whole_groups_within_the_budget(
        self, shapes: list[GroupShape], max_tokens: int
    ) -> None:
        plan = plan_microbatches(shapes, max_tokens)
        assert sorted(i for microbatch in plan for i in microbatch) == list(range(len(shapes)))
        assert all(microbatch == sorted(microbatch) for microbatch in plan)
        for microbatch in plan:
            tokens = padded_tokens([shapes[i] for i in microbatch])
            assert tokens <= max_tokens or len(microbatch) == 1
        assert plan == plan_microbatches(shapes, max_tokens)

    def test_fills_the_budget_exactly(self) -> None:
        shape = GroupShape(num_members=4, prompt_tokens=10, completion_tokens=5)
        assert shape.padded_tokens == 60
        assert plan_microbatches([shape] * 5, 120) == [[0, 1], [2, 3], [4]]
        assert plan_microbatches([shape] * 5, 119) == [[0], [1], [2], [3], [4]]

    def test_a_group_above_the_budget_is_alone(self) -> None:
        large = GroupShape(num_members=4, prompt_tokens=100, completion_tokens=100)
        small = GroupShape(num_members=4, prompt_tokens=1, completion_tokens=1)
        assert plan_microbatches([small, large, small], 100) == [[1], [0, 2]]

    def test_the_budget_counts_the_padding_between_groups(self) -> None:
        long_prompt = GroupShape(num_members=2, prompt_tokens=40, completion_tokens=2)
        long_completion = GroupShape(num_members=2, prompt_tokens=2, completion_tokens=40)
        # 2 * 84 tokens apart, 4 * 80 together.
        assert plan_microbatches([long_prompt, long_completion], 319) == [[0], [1]]
        assert plan_microbatches([long_prompt, long_completion], 320) == [[0, 1]]

    def test_groups_of_like_length_go_together(self) -> None:
        long = GroupShape(num_members=4, prompt_tokens=5, completion_tokens=95)
        short = GroupShape(num_members=4, prompt_tokens=5, completion_tokens=5)
        assert plan_microbatches([short, long, short, long], 800) == [[1, 3], [0, 2]]

    def test_no_budget_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_tokens is 0"):
            plan_microbatches([], 0)


def test_shape_of_a_group_is_that_of_its_longest_completion() -> None:
    group = token_group("a", [1, 2, 3], [4], [5, 6], [7])
    assert GroupShape.of(group) == GroupShape(num_members=3, prompt_tokens=3, completion_tokens=2)


tokens = st.lists(st.integers(0, 98), min_size=1, max_size=6)


@st.composite
def batches(draw: st.DrawFn) -> list[RolloutGroup]:
    num_generations = draw(st.integers(2, 4))
    return [
        token_group(f"g{i}", draw(tokens), *[draw(tokens) for _ in range(num_generations)])
        for i in range(draw(st.integers(1, 4)))
    ]


def prompt_columns(batch: PaddedBatch) -> int:
    return int(batch.input_ids.shape[1] - batch.completion_mask.shape[1])


class TestCollate:
    def test_layout(self) -> None:
        batch = collate(
            [
                make_group("a", [5, 6], [make_completion(0, [7]), make_completion(1, [8, 9], 3)]),
                make_group("b", [4], [make_completion(0, [1, 2, 3], 1), make_completion(1, [2])]),
            ],
            PAD,
        )
        assert batch.input_ids.tolist() == [
            [5, 6, 7, PAD, PAD],
            [5, 6, 8, 9, PAD],
            [PAD, 4, 1, 2, 3],
            [PAD, 4, 2, PAD, PAD],
        ]
        assert batch.attention_mask.tolist() == [
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [0, 1, 1, 1, 1],
            [0, 1, 1, 0, 0],
        ]
        assert batch.position_ids.tolist() == [
            [0, 1, 2, 2, 2],
            [0, 1, 2, 3, 3],
            [0, 0, 1, 2, 3],
            [0, 0, 1, 1, 1],
        ]
        assert batch.completion_mask.tolist() == [
            [True, False, False],
            [True, True, False],
            [True, True, True],
            [True, False, False],
        ]
        assert batch.generator_logprobs.tolist() == [
            [-0.125, 0, 0],
            [-0.125, -0.25, 0],
            [-0.125, -0.25, -0.375],
            [-0.125, 0, 0],
        ]
        assert batch.rewards.tolist() == [[0, 1], [0, 1]]
        assert batch.uids == ("a", "b")
        assert batch.num_generations == 2
        assert batch.oldest_version.tolist() == [0, 3, 1, 0]
        dtypes = [batch.input_ids.dtype, batch.attention_mask.dtype, batch.position_ids.dtype]
        assert dtypes == [np.int64] * 3
        assert batch.completion_mask.dtype == np.bool_
        assert batch.generator_logprobs.dtype == batch.rewards.dtype == np.float32

    # A pad token that occurs among the tokens must not matter.
    @no_deadline
    @given(batches(), st.integers(0, 99))
    def test_tokens_round_trip(self, groups: list[RolloutGroup], pad: int) -> None:
        batch = collate(groups, pad)
        rows = [(g.sampled.prompt.token_ids, c) for g in groups for c in g.sampled.completions]
        p = prompt_columns(batch)
        assert len(rows) == len(batch.input_ids) == batch.rewards.size
        for row, (prompt, completion) in enumerate(rows):
            is_token = batch.attention_mask[row] == 1
            ids = batch.input_ids[row]
            assert ids[:p][is_token[:p]].tolist() == prompt.tolist()
            assert ids[p:][batch.completion_mask[row]].tolist() == completion.token_ids.tolist()
            assert (is_token[p:] == batch.completion_mask[row]).all()
            assert batch.position_ids[row][is_token].tolist() == list(range(is_token.sum()))
            assert is_token[p - 1 : p + 1].all()  # every completion starts at column p
            assert (ids[~is_token] == pad).all()

    def test_different_group_sizes_are_refused(self) -> None:
        groups = [token_group("a", [1], [2], [3]), token_group("b", [1], [2], [3], [4])]
        with pytest.raises(GroupError, match="group b has num_generations 3 but group a has 2"):
            collate(groups, PAD)

    def test_a_group_cut_after_its_construction_is_refused(self) -> None:
        group = token_group("a", [1], [2], [3])
        object.__setattr__(group.sampled, "completions", group.sampled.completions[:1])
        with pytest.raises(GroupError, match=r"group a is not whole.*missing \[1\]"):
            collate([group], PAD)

    def test_the_same_group_twice_is_refused(self) -> None:
        group = token_group("a", [1], [2], [3])
        with pytest.raises(GroupError, match="group a comes 2 times"):
            collate([group, group], PAD)

    def test_an_empty_completion_is_refused(self) -> None:
        with pytest.raises(GroupError, match="group a, member 1: the completion has no tokens"):
            collate([token_group("a", [1], [2], [])], PAD)

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(GroupError, match="group a: the prompt has no tokens"):
            collate([token_group("a", [], [2], [3])], PAD)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.002])
    def test_unusable_logprobs_are_refused(self, bad: float) -> None:
        group = token_group("a", [1], [2], [3, 4])
        group.sampled.completions[1].generator_logprobs[1] = bad
        with pytest.raises(GroupError, match=r"group a, member 1: .* log-prob of token 1 is"):
            collate([group], PAD)

    def test_rounding_above_zero_is_accepted(self) -> None:
        group = token_group("a", [1], [2], [3, 4])
        group.sampled.completions[1].generator_logprobs[1] = 0.0005
        assert collate([group], PAD).generator_logprobs[1, 1] == np.float32(0.0005)

    def test_missing_logprobs_are_refused(self) -> None:
        group = token_group("a", [1], [2], [3, 4])
        object.__setattr__(
            group.sampled.completions[1], "generator_logprobs", np.zeros(1, dtype=np.float32)
        )
        with pytest.raises(GroupError, match=r"group a, member 1: \(1,\) generator log-probs"):
            collate([group], PAD)

    def test_no_groups_are_refused(self) -> None:
        with pytest.raises(ValueError, match="no groups"):
            collate([], PAD)
