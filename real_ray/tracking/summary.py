"""SummaryTracker: remembers a run's course for its last words and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from real_ray.tracking.base import Tracker
from real_ray.types import SampleRecord


class SummaryTracker(Tracker):
    """Rewards of all steps and all evaluations."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.accuracy: list[tuple[int, float]] = []  # (policy version, accuracy)

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self.rewards.append(metrics["reward/mean"])

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self.accuracy.append((policy_version, accuracy))
