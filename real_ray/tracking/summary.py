"""SummaryTracker: remembers a run's course for its last words and its picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from real_ray.tracking.base import Tracker
from real_ray.tracking.records import EarlierRecords
from real_ray.types import SampleRecord


class SummaryTracker(Tracker):
    """Rewards of all steps, all evaluations, the groups by how they ended, and where time went.

    Args:
        step: that the run begins after.
        earlier: what a continued run has recorded before.
    """

    def __init__(self, *, step: int = 0, earlier: EarlierRecords | None = None) -> None:
        self.step_done = step
        self.rewards = list(earlier.rewards) if earlier else []  # (step, mean reward)
        self._accuracy = dict(earlier.accuracy) if earlier else {}
        self.groups: Mapping[str, int] = {}
        self.seconds: Counter[str] = Counter()  # by the names of `metrics.jsonl`

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Policy version and accuracy of the evaluations."""
        return sorted(self._accuracy.items())

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self.step_done = int(metrics["step"])
        self.rewards.append((self.step_done, metrics["reward/mean"]))
        self.seconds.update({name: metrics[name] for name in metrics if name.startswith("time/")})

    def rolled_back(self, step: int) -> None:
        self.step_done = step
        self.rewards = [(at, reward) for at, reward in self.rewards if at <= step]
        self._accuracy = {at: value for at, value in self._accuracy.items() if at <= step}

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self._accuracy[policy_version] = accuracy

    def ledger(self, counts: Mapping[str, int], *, policy_version: int) -> None:
        self.groups = counts
