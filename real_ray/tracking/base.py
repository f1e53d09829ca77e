"""The tracker role: what the driver tells while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from real_ray.buffer import GroupState
from real_ray.types import SampleRecord


class Tracker:
    """Hears what happens in a run. Does nothing by default; subclasses keep what they need."""

    def pipeline(self, counts: Mapping[GroupState, int]) -> None:
        """Groups in each state, whenever that changed."""

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        """One finished step: `real_ray.metrics.step_metrics` and what was trained on."""

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        """Share of the evaluation prompts answered right by a policy version."""

    def ledger(self, counts: Mapping[str, int], *, policy_version: int) -> None:
        """Groups by where they are or how they ended, after each step and at the end."""

    def generators(self, counts: Mapping[str, int]) -> None:
        """Generators that are wanted, and those there are by what they can do, at each change."""

    def rolled_back(self, step: int) -> None:
        """The run goes on after an earlier step; what was told of later ones is made again."""

    def event(self, kind: str, text: str) -> None:
        """Something a user should know of: a retry, a group that failed."""

    def close(self) -> None:
        """The run has ended, well or not."""


class Trackers(Tracker):
    """Passes everything on to several trackers."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = list(trackers)

    def pipeline(self, counts: Mapping[GroupState, int]) -> None:
        for tracker in self._trackers:
            tracker.pipeline(counts)

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        for tracker in self._trackers:
            tracker.step(metrics, samples)

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        for tracker in self._trackers:
            tracker.evaluation(policy_version, accuracy, num_prompts)

    def ledger(self, counts: Mapping[str, int], *, policy_version: int) -> None:
        for tracker in self._trackers:
            tracker.ledger(counts, policy_version=policy_version)

    def generators(self, counts: Mapping[str, int]) -> None:
        for tracker in self._trackers:
            tracker.generators(counts)

    def rolled_back(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.rolled_back(step)

    def event(self, kind: str, text: str) -> None:
        for tracker in self._trackers:
            tracker.event(kind, text)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
