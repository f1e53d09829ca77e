"""When the watchdog tells, what, and when it ends the run; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fakes import make_config

from real_ray.activity import Activity
from real_ray.errors import RunError
from real_ray.simulate import run_in_virtual_time
from real_ray.tracking import Tracker
from real_ray.watchdog import Watchdog


class Events(Tracker):
    def __init__(self) -> None:
        self.told: list[tuple[float, str, str]] = []

    def event(self, kind: str, text: str) -> None:
        self.told.append((asyncio.get_running_loop().time(), kind, text))


def watch(
    run: Callable[[Activity], Awaitable[None]], *, action: str = "warn", hint: str = ""
) -> list[tuple[float, str, str]]:
    """Watch with a limit of 10 s; the events with their times in seconds."""

    async def both() -> list[tuple[float, str, str]]:
        activity = Activity(asyncio.get_running_loop().time)
        config, events = make_config(run={"watchdog_s": 10, "watchdog": action}), Events()
        watchdog = Watchdog(activity, config.run, tracker=events, hint=hint)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watchdog.run())
            await run(activity)
            task.cancel()
        return events.told

    return run_in_virtual_time(both())


def times(told: list[tuple[float, str, str]]) -> list[float]:
    return [round(at, 6) for at, _, _ in told]


def test_says_nothing_while_anything_makes_progress() -> None:
    async def run(activity: Activity) -> None:
        activity.set("learner", "waits for a batch")
        for count in range(20):
            activity.set("buffer", f"{count} groups")
            await asyncio.sleep(9.9)

    assert watch(run) == []


def test_tells_again_after_each_further_limit() -> None:
    async def run(activity: Activity) -> None:
        await asyncio.sleep(4)
        activity.set("learner", "trains step 1")
        for _ in range(31):
            await asyncio.sleep(1)
            activity.set("learner", "trains step 1")

    assert times(watch(run)) == [14, 24, 34]


@pytest.mark.parametrize("progress_after", [0.5, 9.5])
def test_progress_starts_the_limit_anew(progress_after: float) -> None:
    async def run(activity: Activity) -> None:
        await asyncio.sleep(20 + progress_after)
        activity.set("learner", "trains step 1")
        await asyncio.sleep(19)

    assert times(watch(run)) == [10, 20, 30 + progress_after]


def test_the_table_is_aligned_with_the_longest_wait_first() -> None:
    async def run(activity: Activity) -> None:
        activity.set("generator-0", "samples 3 groups")
        await asyncio.sleep(2.5)
        activity.set("buffer", "waits for generator-0")
        await asyncio.sleep(11)

    assert watch(run, hint="stacks: so and so") == [
        (
            12.5,
            "watchdog",
            (
                "no progress for 10 s (run.watchdog_s 10, run.watchdog warn):\n"
                "part         does or waits for       for\n"
                "generator-0  samples 3 groups       12 s\n"
                "buffer       waits for generator-0  10 s\n"
                "stacks: so and so"
            ),
        )
    ]


def test_abort_tells_and_names_who_waits_longest() -> None:
    told = []

    async def run(activity: Activity) -> None:
        activity.set("sync", "waits for generator-1")
        await asyncio.sleep(5)
        activity.set("slots", "waits for a release")
        try:
            await asyncio.sleep(1000)
        finally:
            told.append(asyncio.get_running_loop().time())

    with pytest.raises(ExceptionGroup) as raised:
        watch(run, action="abort")
    (error,) = raised.value.exceptions
    assert isinstance(error, RunError)
    assert str(error) == (
        "the run made no progress for 10 s and was ended (run.watchdog: abort, run.watchdog_s 10); "
        "sync, for 15 s: waits for generator-1. Raise "
        "run.watchdog_s if this can be slow, or set run.watchdog: warn to wait on"
    )
    assert told == [15]


def test_a_run_without_parts_is_told_of_too() -> None:
    async def run(activity: Activity) -> None:
        await asyncio.sleep(1000)

    with pytest.raises(ExceptionGroup) as raised:
        watch(run, action="abort")
    assert "no part has anything to do" in str(raised.value.exceptions[0])
