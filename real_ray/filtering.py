"""Which groups `rollout.dynamic_sampling` keeps: those that teach something."""

from __future__ import annotations

from real_ray.config import LossConfig
from real_ray.types import RolloutTicket


def is_two_sided(group: RolloutTicket, loss: LossConfig) -> bool:
    """Whether the members that count have both classes, or, for advantages, unequal rewards."""
    rewards = [
        reward
        for reward, truncated in zip(group.rewards, group.sampled.truncated, strict=True)
        if not (truncated and loss.truncated == "exclude")
    ]
    if loss.type in ("real", "real_bce") and loss.labels == "threshold":
        return len({reward > loss.positive_above for reward in rewards}) == 2
    # A reward above the mean of its group needs another one below it.
    return len(set(rewards)) > 1
