"""What the driver tells reaches every tracker; a tracker may leave out what it does not need."""

from __future__ import annotations

from typing import Any

from real_ray.buffer import GroupState
from real_ray.tracking import Tracker, Trackers
from real_ray.tracking.records import EarlierRecords
from real_ray.tracking.summary import SummaryTracker

CALLS: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("pipeline", ({GroupState.READY: 1},), {}),
    ("evaluation", (0, 0.25, 32), {}),
    ("event", ("group failed", "group a: NaN"), {}),
    ("step", ({"step": 1, "reward/mean": 0.5}, ()), {}),
    ("step", ({"step": 2, "reward/mean": 0.75}, ()), {}),
    ("ledger", ({"drawn": 6, "trained": 4, "in flight": 2},), {"policy_version": 2}),
    ("evaluation", (2, 0.5, 32), {}),
    ("close", (), {}),
)
Log = list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]


class Recorder(Tracker):
    """Writes every call into a log that may be shared."""

    def __init__(self, name: str, log: Log) -> None:
        self._name, self._log = name, log

    def pipeline(self, *args: Any) -> None:
        self._log.append((self._name, "pipeline", args, {}))

    def step(self, *args: Any) -> None:
        self._log.append((self._name, "step", args, {}))

    def evaluation(self, *args: Any) -> None:
        self._log.append((self._name, "evaluation", args, {}))

    def ledger(self, *args: Any, **named: Any) -> None:
        self._log.append((self._name, "ledger", args, named))

    def event(self, *args: Any) -> None:
        self._log.append((self._name, "event", args, {}))

    def close(self) -> None:
        self._log.append((self._name, "close", (), {}))


def tell(tracker: Tracker) -> None:
    for name, args, named in CALLS:
        getattr(tracker, name)(*args, **named)


def test_everything_reaches_all_trackers_in_order() -> None:
    log: Log = []
    tell(Trackers([Recorder("a", log), Recorder("b", log)]))
    assert log == [(who, *call) for call in CALLS for who in "ab"]


def test_a_tracker_that_needs_nothing_hears_everything() -> None:
    tell(Trackers([Tracker(), Trackers([])]))


def test_the_summary_keeps_rewards_evaluations_and_groups() -> None:
    summary = SummaryTracker()
    tell(Trackers([summary]))
    assert summary.rewards == [(1, 0.5), (2, 0.75)]
    assert summary.accuracy == [(0, 0.25), (2, 0.5)]
    assert summary.step_done == 2
    assert summary.groups == {"drawn": 6, "trained": 4, "in flight": 2}


def test_the_summary_of_a_continued_run_covers_all_of_it() -> None:
    earlier = EarlierRecords(
        rewards=((1, 0.25), (2, 0.375)), accuracy=((0, 0.125), (2, 0.25)), elapsed_s=9.0
    )
    summary = SummaryTracker(step=2, earlier=earlier)
    assert summary.step_done == 2
    summary.step({"step": 3, "reward/mean": 0.5}, ())
    summary.evaluation(2, 0.375, 32)  # again, as its end was not saved
    summary.evaluation(4, 0.5, 32)
    assert summary.rewards == [(1, 0.25), (2, 0.375), (3, 0.5)]
    assert summary.accuracy == [(0, 0.125), (2, 0.375), (4, 0.5)]
    assert summary.step_done == 3
