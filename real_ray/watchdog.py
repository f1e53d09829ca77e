"""Watchdog: tells who waits for whom when a run stands still."""

from __future__ import annotations

import asyncio

from real_ray.activity import Activity
from real_ray.config import RunConfig
from real_ray.errors import RunError
from real_ray.tracking import Tracker


class Watchdog:
    """Looks at an `Activity` as long as `run` is awaited.

    Example: ``watch = tasks.create_task(Watchdog(activity, config.run, tracker=tracker).run())``

    Args:
        hint: how to find out more, the last line of what is told; empty: nothing.
    """

    def __init__(
        self, activity: Activity, config: RunConfig, *, tracker: Tracker, hint: str = ""
    ) -> None:
        self._activity = activity
        self._config = config
        self._tracker = tracker
        self._hint = hint

    async def run(self) -> None:
        """Tell after each `run.watchdog_s` seconds without any progress. Does not return.

        Raises:
            RunError: with `run.watchdog: abort`, the first time; it names the part that is
                without progress the longest.
        """
        limit_s, told = self._config.watchdog_s, 0
        while True:
            quiet_s = self._activity.seconds_since_progress()
            if quiet_s < told * limit_s:  # there was progress after it was told
                told = 0
            until_due_s = (told + 1) * limit_s - quiet_s
            if until_due_s > 0:
                await asyncio.sleep(until_due_s)
                continue
            told += 1
            self._tracker.event(
                "watchdog",
                f"no progress for {quiet_s:.0f} s (run.watchdog_s {limit_s:g}, run.watchdog "
                f"{self._config.watchdog}):\n{self.table()}"
                + (f"\n{self._hint}" if self._hint else ""),
            )
            if self._config.watchdog == "abort":
                raise RunError(self._blame(quiet_s))

    def table(self) -> str:
        """Part, what it does or waits for, and for how long: aligned lines, the longest first."""
        cells = [("part", "does or waits for", "for")] + [
            (row.part, row.state, f"{row.seconds:.0f} s") for row in self._activity.rows()
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        return "\n".join(
            f"{part:{widths[0]}}  {state:{widths[1]}}  {seconds:>{widths[2]}}"
            for part, state, seconds in cells
        )

    def _blame(self, quiet_s: float) -> str:
        rows = self._activity.rows()
        # What the driver waits for is what the run waits for.
        stuck = next((row for row in rows if row.part == "driver"), rows[0] if rows else None)
        longest = (
            f"{stuck.part}, for {stuck.seconds:.0f} s: {stuck.state}"
            if stuck
            else "no part has anything to do"
        )
        return (
            f"the run made no progress for {quiet_s:.0f} s and was ended (run.watchdog: abort, "
            f"run.watchdog_s {self._config.watchdog_s:g}); {longest}. Raise run.watchdog_s if this "
            "can be slow, or set run.watchdog: warn to wait on"
        )
