"""Checks of what the losses are given."""

from __future__ import annotations

import torch
from torch import Tensor

from real_ray.errors import GroupError, RewardError


def check_groups(name: str, values: Tensor) -> None:
    """Raise `GroupError` unless the shape is [G, N] with N of at least 2."""
    if values.ndim != 2 or values.shape[1] < 2:
        raise GroupError(
            f"the shape of {name} is {tuple(values.shape)}: expected [groups, num_generations] "
            "with num_generations of at least 2"
        )


def check_same_groups(name: str, values: Tensor, other_name: str, other: Tensor) -> None:
    """Raise `GroupError` unless both have the same shape."""
    if values.shape != other.shape:
        raise GroupError(
            f"the shape of {name} is {tuple(values.shape)} but that of {other_name} is "
            f"{tuple(other.shape)}: both must be [groups, num_generations] of the same groups"
        )


def check_rewards(rewards: Tensor) -> None:
    """Raise `RewardError`, naming group (row) and member, for a reward that is not finite.

    Members that are excluded are checked too: their reward shows that the function is at fault.
    """
    bad = torch.nonzero(~torch.isfinite(rewards))
    if len(bad):
        row, member = bad[0].tolist()
        raise RewardError(
            f"reward of member {member} of group {row} in the batch is "
            f"{rewards[row, member].item()}: the reward function must return a finite number"
        )


def as_bool(name: str, values: Tensor) -> Tensor:
    """The values as bool; raises ValueError unless they are bool, or integers 0 and 1."""
    if values.dtype == torch.bool:
        return values
    if values.is_floating_point() or values.is_complex():
        raise ValueError(f"{name} has dtype {values.dtype}: use bool, or integers 0 and 1")
    bad = values[(values != 0) & (values != 1)]
    if len(bad):
        raise ValueError(f"{name} has the value {int(bad[0])}: use bool, or integers 0 and 1")
    return values.bool()
