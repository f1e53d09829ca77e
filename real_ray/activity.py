"""What each part of a run does or waits for, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One part of the run.

    Example: ``Row(part="learner", state="waits for step 3 to be trained", seconds=12.5)``
    """

    part: str
    state: str
    seconds: float  # since the last progress of this part


class Activity:
    """The state of every part that has something to do, as its owner last told it.

    A change is progress; the same text again is not, however often it is told.

    Args:
        clock: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[str, tuple[str, float]] = {}
        self._last_progress = clock()

    def set(self, part: str, state: str) -> None:
        """Tell what a part does or waits for.

        A text with what moves in it, such as a count, makes every move progress. A part that is
        idle because nothing is asked of it should be removed: it would be taken for the one that
        the others wait for.
        """
        if part in self._parts and self._parts[part][0] == state:
            return
        self._last_progress = self._clock()
        self._parts[part] = (state, self._last_progress)

    def remove(self, part: str) -> None:
        """A part has ended or has nothing to do, which is progress if it had; any name will do."""
        if self._parts.pop(part, None) is not None:
            self._last_progress = self._clock()

    def rows(self) -> list[Row]:
        """All parts, the one longest without progress first."""
        now = self._clock()
        return [
            Row(part=part, state=state, seconds=now - since)
            for part, (state, since) in sorted(self._parts.items(), key=lambda item: item[1][1])
        ]

    def seconds_since_progress(self) -> float:
        """Seconds since any part made progress, or since the start."""
        return self._clock() - self._last_progress
