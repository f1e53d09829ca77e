"""StopOnSignal: the first SIGINT or SIGTERM ends a run in order, a second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from real_ray.driver import Driver

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """Runs the work of a job, and ends it early when it is asked to.

    Args:
        grace_s: time that groups under way get.
    """

    def __init__(self, *, grace_s: float, out: Console) -> None:
        self._grace_s = grace_s
        self._out = out
        self._stopped_by: signal.Signals | None = None
        self._driver: Driver | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> signal.Signals | None:
        """Run it to its end; return the signal, if one was the reason."""
        asyncio.run(self._run(work))
        return self._stopped_by

    @property
    def is_asked(self) -> bool:
        """Whether the run is to end."""
        return self._stopped_by is not None

    @contextmanager
    def of(self, driver: Driver) -> Iterator[None]:
        """While this driver runs, it saves a checkpoint before it ends."""
        self._driver = driver
        try:
            yield
        finally:
            self._driver = None

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(work())
        for signum in _SIGNALS:  # ray.init has put its own handlers in place by now
            loop.add_signal_handler(signum, self._stop, signum)
        try:
            await self._task
        except asyncio.CancelledError:
            if self._stopped_by is None:
                raise

    def _stop(self, signum: signal.Signals) -> None:
        assert self._task is not None
        self._stopped_by = signum
        for each in _SIGNALS:
            self._task.get_loop().remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        if self._driver is None:
            self._out.print(f"{signum.name}: stopping, nothing is trained at this moment")
            self._task.cancel()
            return
        self._out.print(
            f"{signum.name}: stopping after the step under way; groups under way have "
            f"{self._grace_s:g} s (run.stop_grace_s), then a checkpoint is saved. A second signal "
            "ends the run at once"
        )
        self._driver.stop(grace_s=self._grace_s)
