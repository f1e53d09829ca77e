"""The classes of a group: which members are positives, and which groups have both classes.

Shapes: ``G`` groups of ``N`` members.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from real_ray.loss.checks import as_bool, check_groups, check_rewards, check_same_groups


def labels(
    rewards: Tensor,
    *,
    mode: Literal["threshold", "group_mean"] = "threshold",
    positive_above: float,
    included: Tensor | None = None,
) -> Tensor:
    """Label of each member: positive if its reward is above a bound.

    Args:
        rewards: [G, N].
        mode: the bound is ``positive_above``, or the mean reward of the included members of the
            group. A group with equal rewards then has no positives.
        positive_above: read only in the mode ``threshold``.
        included: [G, N] bool or 0/1; all members if not given. An excluded member gets a label by
            the same bound, but does not move it.

    Returns:
        [G, N] bool.

    Raises:
        GroupError: the shapes differ, or are not [G, N] with N of at least 2.
        RewardError: a reward is not finite; names its group (row) and member.
        ValueError: the mode is unknown, or ``included`` is neither 0 nor 1.
    """
    check_groups("rewards", rewards)
    check_rewards(rewards)
    if mode == "threshold":
        return rewards > positive_above
    if mode != "group_mean":
        raise ValueError(f"mode is {mode!r}: use 'threshold' or 'group_mean'")
    if included is None:
        included = torch.ones_like(rewards, dtype=torch.bool)
    check_same_groups("rewards", rewards, "included", included)
    included = as_bool("included", included)
    exact = rewards.double()
    count = included.sum(dim=1, keepdim=True).clamp_min(1)
    mean = exact.masked_fill(~included, 0.0).sum(dim=1, keepdim=True) / count
    # A mean that is rounded to below equal rewards would make all of them positive.
    lowest = exact.masked_fill(~included, math.inf).amin(dim=1, keepdim=True)
    return exact > torch.maximum(mean, lowest)


def split_classes(positive: Tensor, included: Tensor | None) -> tuple[Tensor, Tensor]:
    """Included positives and included negatives, each [G, N] bool; raises as `two_sided`."""
    check_groups("positive", positive)
    is_positive = as_bool("positive", positive)
    if included is None:
        return is_positive, ~is_positive
    check_same_groups("positive", positive, "included", included)
    is_included = as_bool("included", included)
    return is_positive & is_included, ~is_positive & is_included


def two_sided(positive: Tensor, included: Tensor | None = None) -> Tensor:
    """Which groups have at least one positive and one negative among their included members.

    Args:
        positive: [G, N] bool or 0/1.
        included: [G, N] bool or 0/1; all members if not given.

    Returns:
        [G] bool.

    Raises:
        GroupError: the shapes differ, are not [G, N], or N is below 2.
        ValueError: a label is neither 0 nor 1.
    """
    positives, negatives = split_classes(positive, included)
    return positives.any(dim=1) & negatives.any(dim=1)


def count_groups(two_sided: Tensor, group_denominator: Literal["all", "valid"]) -> int:
    """Groups that the loss of a step is averaged over.

    Args:
        two_sided: [G] bool, from `two_sided`.
        group_denominator: ``all`` groups, or only the ``valid`` (two-sided) ones.
    """
    if group_denominator == "all":
        return two_sided.numel()
    if group_denominator == "valid":
        return int(two_sided.sum())
    raise ValueError(f"group_denominator is {group_denominator!r}: use 'all' or 'valid'")
