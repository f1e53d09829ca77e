"""What the types of a rollout refuse, and what they say of policy versions."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_ray.errors import GroupError
from real_ray.types import (
    Completion,
    Prompt,
    RolloutGroup,
    SampledGroup,
    SampledTicket,
    VersionSpan,
    check_whole_group,
)

PROMPT = Prompt(uid="sums:7@0", text="3+4", token_ids=np.arange(3, dtype=np.int32), answer="7")
Bounds = tuple[int, int, int]  # version, start, end


def make_completion(
    index: int = 0, *, num_tokens: int = 4, spans: tuple[Bounds, ...] = ((0, 0, 4),)
) -> Completion:
    return Completion(
        index=index,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        generator_logprobs=np.zeros(num_tokens, dtype=np.float32),
        spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans),
        text="7",
        finish_reason="stop",
    )


def make_group(*completions: Completion, num_generations: int = 2) -> SampledGroup:
    return SampledGroup(prompt=PROMPT, num_generations=num_generations, completions=completions)


class TestCheckWholeGroup:
    @given(st.integers(1, 12))
    def test_all_members_in_order_pass(self, n: int) -> None:
        check_whole_group("u", range(n), n)
        check_whole_group("u", list(range(n)), n)

    @given(n=st.integers(2, 8), data=st.data())
    def test_anything_else_is_refused_by_uid(self, n: int, data: st.DataObject) -> None:
        indices = data.draw(
            st.lists(st.integers(-1, n), max_size=n + 2).filter(lambda i: i != list(range(n)))
        )
        with pytest.raises(GroupError, match=r"^group sums:7@0(: members are| is not whole)"):
            check_whole_group("sums:7@0", indices, n)

    @pytest.mark.parametrize(
        ("indices", "facts"),
        [
            ([0, 1, 3], "got 3 (missing [2], repeated [], surplus [])"),
            ([0, 1, 1, 3], "got 4 (missing [2], repeated [1], surplus [])"),
            ([0, 1, 2, 3, 4], "got 5 (missing [], repeated [], surplus [4])"),
            ([0, 1, 2, 3] * 2, "got 8 (missing [], repeated [0, 1, 2, 3], surplus [])"),
            ([], "got 0 (missing [0, 1, 2, 3], repeated [], surplus [])"),
        ],
    )
    def test_members_are_named(self, indices: list[int], facts: str) -> None:
        message = f"group u is not whole: expected members 0 to 3, {facts}"
        with pytest.raises(GroupError, match=f"^{re.escape(message)}$"):
            check_whole_group("u", indices, 4)

    def test_another_order_is_named(self) -> None:
        with pytest.raises(GroupError, match=r"^group u: members are out of order: \[1, 0\]$"):
            check_whole_group("u", [1, 0], 2)


class TestSampledGroup:
    def test_a_whole_group_is_kept_as_it_is(self) -> None:
        completions = (make_completion(0), make_completion(1))
        assert make_group(*completions).completions == completions

    @pytest.mark.parametrize("indices", [(0,), (0, 1, 2), (1, 0), (0, 0)])
    def test_fragments_and_merges_are_refused(self, indices: tuple[int, ...]) -> None:
        with pytest.raises(GroupError, match="sums:7@0"):
            make_group(*map(make_completion, indices))

    @pytest.mark.parametrize(
        "spans",
        [
            (),
            ((0, 0, 3),),
            ((0, 1, 4),),
            ((0, 0, 5),),
            ((0, 0, 1), (1, 2, 4)),
            ((0, 0, 3), (1, 2, 4)),
            ((0, 2, 4), (1, 0, 2)),
            ((0, 0, 6), (1, 6, 4)),
        ],
    )
    def test_tokens_of_unknown_version_are_refused(self, spans: tuple[Bounds, ...]) -> None:
        shown = [(start, end) for _, start, end in spans]
        message = f"group sums:7@0, member 1: version spans {shown} do not cover its 4 tokens"
        with pytest.raises(GroupError, match=re.escape(message)):
            make_group(make_completion(0), make_completion(1, spans=spans))


class TestVersions:
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6))
    def test_oldest_and_newest_are_those_of_the_tokens(self, parts: list[tuple[int, int]]) -> None:
        spans: list[Bounds] = []
        for version, length in parts:
            start = spans[-1][2] if spans else 0
            spans.append((version, start, start + length))
        completion = make_completion(num_tokens=spans[-1][2], spans=tuple(spans))
        assert completion.oldest_version == min(version for version, _ in parts)
        assert completion.newest_version == max(version for version, _ in parts)
        make_group(completion, num_generations=1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_ticket_counts_the_completion_tokens_of_its_members(lengths: list[int]) -> None:
    ticket = SampledTicket(
        uid="sums:7@0",
        prompt_tokens=30,
        completion_tokens=tuple(lengths),
        truncated=(False,) * len(lengths),
        oldest_version=3,
        newest_version=4,
        seconds=1.0,
        generator="generator-0",
        ref=None,
    )
    assert ticket.num_members == len(lengths)
    assert ticket.num_tokens == sum(lengths)


class TestRolloutGroup:
    def test_has_the_uid_of_its_prompt(self) -> None:
        sampled = make_group(make_completion(0), make_completion(1))
        group = RolloutGroup(sampled=sampled, rewards=np.array([1, 0], dtype=np.float32))
        assert group.uid == "sums:7@0"

    @pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (1, 2), ()])
    def test_one_reward_a_member(self, shape: tuple[int, ...]) -> None:
        sampled = make_group(make_completion(0), make_completion(1))
        message = f"group sums:7@0: {shape} rewards for 2 completions"
        with pytest.raises(GroupError, match=f"^{re.escape(message)}$"):
            RolloutGroup(sampled=sampled, rewards=np.zeros(shape, dtype=np.float32))
