"""Ledger: every group that was drawn is accounted for, once.

::

    drawn = trained + filtered + evicted + failed      closed: never drawn again
          + buffered + training + in flight            open: in the `GroupBuffer`

Groups are drawn in the order of their numbers (`PromptCursor`), so almost all closed numbers lie
below the oldest open one. The ledger keeps that bound, and single numbers only above it: its size
does not grow with the run. A checkpoint holds the closed numbers; all others are drawn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from real_ray.errors import LedgerError

_SHOWN = 5  # uids in a message


class Outcome(Enum):
    """How a group left the pipeline."""

    TRAINED = "trained"
    FILTERED = "filtered"  # one class only, and `rollout.dynamic_sampling` asks for two
    EVICTED = "evicted"  # a straggler, with `rollout.straggler: evict`
    FAILED = "failed"  # could not be generated or scored


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """What a checkpoint keeps of a ledger.

    Example: ``LedgerState(closed_below=40, closed=(42,), outcomes={"trained": 40, "failed": 1})``
    """

    closed_below: int  # all numbers below are closed
    closed: tuple[int, ...]  # further closed numbers, ascending
    outcomes: Mapping[str, int]  # closed groups by `Outcome`


class Ledger:
    """Which groups were drawn, and how each of them ended.

    Args:
        state: of a checkpoint; None: nothing has been drawn yet.
    """

    def __init__(self, state: LedgerState | None = None) -> None:
        self._closed_below = state.closed_below if state else 0
        self._closed = set(state.closed) if state else set()
        self._outcomes = Counter(
            {o: state.outcomes.get(o.value, 0) for o in Outcome} if state else {}
        )
        self._open: dict[str, int] = {}  # uid -> number

    def is_closed(self, number: int) -> bool:
        """Whether the group of this number has been drawn and has left the pipeline."""
        return number < self._closed_below or number in self._closed

    def draw(self, number: int, uid: str) -> None:
        """A group has been drawn.

        Raises:
            LedgerError: it was drawn before.
        """
        if self.is_closed(number) or uid in self._open:
            raise LedgerError(f"group {uid} (draw {number}) is drawn a second time")
        self._open[uid] = number

    def close(self, uid: str, outcome: Outcome) -> None:
        """A group has left the pipeline.

        Raises:
            LedgerError: it is not in there.
        """
        number = self._open.pop(uid, None)
        if number is None:
            raise LedgerError(f"group {uid} cannot be {outcome.value}: it is not open")
        self._outcomes[outcome] += 1
        self._closed.add(number)
        while self._closed_below in self._closed:
            self._closed.remove(self._closed_below)
            self._closed_below += 1

    def number(self, uid: str) -> int:
        """The number of an open group."""
        return self._open[uid]

    def count(self, outcome: Outcome) -> int:
        """Groups that ended so."""
        return self._outcomes[outcome]

    @property
    def num_drawn(self) -> int:
        """Groups drawn, each counted once."""
        return sum(self._outcomes.values()) + len(self._open)

    def check(self, in_pipeline: Iterable[str]) -> None:
        """Compare the open groups with those that the pipeline holds, and count the closed ones.

        Raises:
            LedgerError: naming groups that were lost, that nobody drew, or the wrong sums.
        """
        pipeline = set(in_pipeline)
        problems = [
            f"{len(uids)} {what}: {', '.join(sorted(uids)[:_SHOWN])}"
            + (" ..." if len(uids) > _SHOWN else "")
            for what, uids in (
                ("groups were drawn and are lost", self._open.keys() - pipeline),
                ("groups are in the pipeline and were not drawn", pipeline - self._open.keys()),
            )
            if uids
        ]
        closed = self._closed_below + len(self._closed)
        if (counted := sum(self._outcomes.values())) != closed:
            problems.append(f"{closed} groups are closed and {counted} have an outcome")
        if problems:
            raise LedgerError(f"the ledger does not close: {'; '.join(problems)}")

    def summary(self, *, buffered: int, training: int, in_flight: int) -> dict[str, int]:
        """All groups by how they ended or where they are; the first number is the sum."""
        return {
            "drawn": self.num_drawn,
            **{outcome.value: self.count(outcome) for outcome in Outcome},
            "buffered": buffered,
            "training": training,
            "in flight": in_flight,
        }

    def state(self) -> LedgerState:
        """What a checkpoint keeps: open groups are not in it, and are drawn again."""
        return LedgerState(
            closed_below=self._closed_below,
            closed=tuple(sorted(self._closed)),
            outcomes={outcome.value: self._outcomes[outcome] for outcome in Outcome},
        )
