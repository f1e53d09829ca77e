"""What the driver tells reaches every tracker; a tracker may leave out what it does not need."""

from __future__ import annotations

from real_ray.buffer import GroupState
from real_ray.tracking import Tracker, Trackers
from real_ray.tracking.summary import SummaryTracker

CALLS = (
    ("pipeline", ({GroupState.READY: 1},)),
    ("evaluation", (0, 0.25, 32)),
    ("event", ("group dropped", "group a failed")),
    ("step", ({"step": 1, "reward/mean": 0.5}, ())),
    ("step", ({"step": 2, "reward/mean": 0.75}, ())),
    ("evaluation", (2, 0.5, 32)),
    ("close", ()),
)


class Recorder(Tracker):
    """Writes every call into a log that may be shared."""

    def __init__(self, name: str, log: list[tuple[str, str, tuple[object, ...]]]) -> None:
        self._name, self._log = name, log

    def pipeline(self, *args: object) -> None:
        self._log.append((self._name, "pipeline", args))

    def step(self, *args: object) -> None:
        self._log.append((self._name, "step", args))

    def evaluation(self, *args: object) -> None:
        self._log.append((self._name, "evaluation", args))

    def event(self, *args: object) -> None:
        self._log.append((self._name, "event", args))

    def close(self) -> None:
        self._log.append((self._name, "close", ()))


def tell(tracker: Tracker) -> None:
    for name, args in CALLS:
        getattr(tracker, name)(*args)


def test_everything_reaches_all_trackers_in_order() -> None:
    log: list[tuple[str, str, tuple[object, ...]]] = []
    tell(Trackers([Recorder("a", log), Recorder("b", log)]))
    assert log == [(who, name, args) for name, args in CALLS for who in "ab"]


def test_a_tracker_that_needs_nothing_hears_everything() -> None:
    tell(Trackers([Tracker(), Trackers([])]))


def test_the_summary_keeps_rewards_and_evaluations() -> None:
    summary = SummaryTracker()
    tell(Trackers([summary]))
    assert summary.rewards == [0.5, 0.75]
    assert summary.accuracy == [(0, 0.25), (2, 0.5)]
