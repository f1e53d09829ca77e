"""RewardActor: one process that scores groups."""

from __future__ import annotations

import time

from actors.stacks import enable_stacks
from real_ray.rewards import load_reward, score_group
from real_ray.types import RolloutGroup, SampledGroup


class RewardActor:
    """A Ray actor around one reward function."""

    def __init__(self, function: str) -> None:
        enable_stacks()
        self._reward = load_reward(function)

    def score(self, group: SampledGroup) -> tuple[tuple[list[float], float], RolloutGroup]:
        """Score one whole group (two Ray returns: rewards and seconds, and the scored group).

        Raises:
            RewardError: naming the function, the uid and the member.
        """
        began = time.monotonic()
        scored = score_group(self._reward, group)
        return (scored.rewards.tolist(), time.monotonic() - began), scored
