"""Group-relative advantages, of the losses that REAL is compared with."""

from __future__ import annotations

from torch import Tensor

from real_ray.loss.base import GroupTable
from real_ray.loss.checks import check_groups, check_rewards, check_same_groups


def group_advantages(table: GroupTable) -> Tensor:
    """``(reward - mean) / (std + 1e-4)`` over the included members of each group.

    Source: GRPO, arXiv 2402.03300, section 4.1.2, with the sample standard deviation (ddof 1).

    Returns:
        [G, N] float64. Exactly 0 for an excluded member, and in a group whose included members
        have equal rewards or are fewer than 2.

    Raises:
        GroupError: the shapes differ, or are not [G, N] with N of at least 2.
        RewardError: a reward is not finite.
    """
    rewards, included = table.rewards, table.included
    check_groups("rewards", rewards)
    check_same_groups("rewards", rewards, "included", included)
    check_rewards(rewards)
    exact = rewards.double()  # so the mean of equal float32 rewards is exact
    count = included.sum(dim=1, keepdim=True)
    mean = exact.masked_fill(~included, 0.0).sum(dim=1, keepdim=True) / count.clamp_min(1)
    deviation = (exact - mean).masked_fill(~included, 0.0)
    variance = deviation.square().sum(dim=1, keepdim=True) / (count - 1).clamp_min(1)
    return deviation / (variance.sqrt() + 1e-4)
