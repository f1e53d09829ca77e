"""Group-relative advantages, of the losses that REAL is compared with."""

from __future__ import annotations

from torch import Tensor

from real_ray.loss.checks import check_groups, check_rewards, check_same_groups


def group_advantages(rewards: Tensor, included: Tensor) -> Tensor:
    """``(reward - mean) / (std + 1e-6)`` over the included members of each group.

    Source: GRPO, arXiv 2402.03300, section 4.1.2, with the sample standard deviation (ddof 1).

    Args:
        rewards: [G, N].
        included: [G, N] bool.

    Returns:
        [G, N] float64. Exactly 0 for an excluded member, and in a group whose included members
        have equal rewards or are fewer than 2.

    Raises:
        GroupError: the shapes differ, or are not [G, N] with N of at least 2.
        RewardError: a reward is not finite.
    """
    check_groups("rewards", rewards)
    check_same_groups("rewards", rewards, "included", included)
    check_rewards(rewards)
    exact = rewards.double()
    count = included.sum(dim=1, keepdim=True)
    mean = exact.masked_fill(~included, 0.0).sum(dim=1, keepdim=True) / count.clamp_min(1)
    deviation = (exact - mean).masked_fill(~included, 0.0)
    variance = deviation.square().sum(dim=1, keepdim=True) / (count - 1).clamp_min(1)
    # Rounding of the mean must not turn equal rewards into small advantages.
    highest = exact.masked_fill(~included, float("-inf")).amax(dim=1, keepdim=True)
    lowest = exact.masked_fill(~included, float("inf")).amin(dim=1, keepdim=True)
    return (deviation / (variance.sqrt() + 1e-4)).masked_fill(highest <= lowest, 0.0)
