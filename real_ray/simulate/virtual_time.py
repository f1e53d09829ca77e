"""An event loop whose clock jumps: coroutines that only wait for timers and each other run at once.

The same coroutines do the same in the same order each time, as nothing depends on the real clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

from real_ray.errors import RunError

_T = TypeVar("_T")
_SHOWN = 3  # tasks that wait at the same place


def run_in_virtual_time(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, as `asyncio.run`. Its loop's clock begins at 0 seconds.

    Raises:
        RunError: every task waits for another one and no timer is left; it names who waits where.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Hears no file or socket, only timers."""

    def __init__(self) -> None:
        self._selector_clock = _JumpingClock()
        super().__init__(self._selector_clock)
        # asyncio's: timers that are due so soon are due now. Its 1 ns is lost in the rounding of
        # what comes after 100 days, and no timer would ever be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._selector_clock.now


class _JumpingClock(selectors.SelectSelector):
    """Takes the loop's wish to sleep for the end of that sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RunError(
                f"the simulation stands still after {self.now:.6g} s, as nothing can happen any "
                f"more: {_who_waits()}"
            )
        if timeout > 0:
            self.now += timeout
        return []


def _who_waits() -> str:
    waiting: dict[str, list[str]] = defaultdict(list)
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        waiting[_place(task)].append(task.get_name())
    return "; ".join(
        f"{', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        + f" in {place}"
        for place, names in waiting.items()
    )


def _place(task: asyncio.Task[Any]) -> str:
    """The coroutines that await each other, outermost first."""
    names = []
    awaited: Any = task.get_coro()
    while hasattr(awaited, "cr_await"):
        names.append(awaited.__qualname__)
        awaited = awaited.cr_await
    return " > ".join(names)
