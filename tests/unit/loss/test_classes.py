from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from real_ray.errors import GroupError, RewardError
from real_ray.loss import labels, two_sided


class TestThreshold:
    def test_is_strict(self) -> None:
        rewards = torch.tensor([[0.0, 1.0, 0.5], [-1.0, 0.1, 2.0]])
        assert labels(rewards, positive_above=0.0).tolist() == [
            [False, True, True],
            [False, True, True],
        ]
        assert labels(rewards, positive_above=0.5).tolist() == [
            [False, True, False],
            [False, False, True],
        ]


class TestGroupMean:
    def label(self, rewards: list[float], included: list[bool] | None = None) -> list[bool]:
        mask = None if included is None else torch.tensor([included])
        values = torch.tensor([rewards], dtype=torch.float64)
        (row,) = labels(values, mode="group_mean", positive_above=99.0, included=mask).tolist()
        return row

    def test_above_the_mean_of_the_group(self) -> None:
        rewards = torch.tensor([[1.0, 1.0, 1.0, 0.9], [5.0, 1.0, 1.0, 1.0]])
        assert labels(rewards, mode="group_mean", positive_above=0.0).tolist() == [
            [True, True, True, False],
            [True, False, False, False],
        ]
        assert self.label([0.0, 1.0, 0.5]) == [False, True, False]

    def test_an_excluded_member_does_not_move_the_mean(self) -> None:
        assert self.label([0.0, 1.0, 0.6]) == [False, True, True]
        assert self.label([0.0, 1.0, 0.6], [False, True, True]) == [False, True, False]
        assert self.label([0.0, 1.0, 1e300], [True, True, False])[:2] == [False, True]

    def test_a_group_without_included_members_has_no_positives(self) -> None:
        assert self.label([0.0, 1.0], [False, False]) == [False, False]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @given(
        reward=st.floats(-1024, 1024, width=32),
        others=st.lists(st.floats(-10, 10, width=32), max_size=3),
        size=st.integers(2, 64),
    )
    def test_equal_rewards_are_all_negative(
        self, dtype: torch.dtype, reward: float, others: list[float], size: int
    ) -> None:
        value = reward / 3 if dtype == torch.float64 else reward  # all bits of the mantissa
        rewards = torch.tensor([[value] * size + others], dtype=dtype)
        included = torch.tensor([[True] * size + [False] * len(others)])
        positive = labels(rewards, mode="group_mean", positive_above=0.0, included=included)
        assert not positive[0, :size].any()

    @pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e-30])
    @pytest.mark.parametrize("size", [3, 7, 49])
    def test_equal_rewards_with_a_rounded_mean(self, reward: float, size: int) -> None:
        assert self.label([reward] * size) == [False] * size


class TestTwoSided:
    def test_is_decided_after_the_exclusion(self) -> None:
        y = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])
        included = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0], [1, 1, 1]])
        assert two_sided(y).tolist() == [True, True, True, False]
        assert two_sided(y, included).tolist() == [False, False, True, False]


class TestRefusals:
    @pytest.mark.parametrize("mode", ["threshold", "group_mean"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_not_finite(self, mode: str, bad: float) -> None:
        rewards = torch.tensor([[0.0, 1.0, 0.5], [1.0, bad, 2.0]])
        for included in (None, torch.tensor([[True] * 3, [True, False, True]])):
            with pytest.raises(RewardError, match=rf"member 1 of group 1 .* {bad}"):
                labels(rewards, mode=mode, positive_above=0.0, included=included)  # type: ignore[arg-type]

    @pytest.mark.parametrize("shape", [(4,), (2, 1), (2, 2, 2)])
    def test_not_groups_of_two_or_more(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(GroupError, match="at least 2"):
            labels(torch.zeros(shape), positive_above=0.0)

    def test_included_of_another_shape(self) -> None:
        with pytest.raises(GroupError, match=r"\(2, 3\).*\(1, 3\)"):
            labels(
                torch.zeros(2, 3),
                mode="group_mean",
                positive_above=0.0,
                included=torch.ones(1, 3, dtype=torch.bool),
            )

    def test_unknown_mode(self) -> None:
        with pytest.raises(ValueError, match="'median'"):
            labels(torch.zeros(1, 2), mode="median", positive_above=0.0)  # type: ignore[arg-type]
