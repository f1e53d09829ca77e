"""Virtual time: sleeps end at once, in the order of a real clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from real_ray.errors import RunError
from real_ray.simulate import run_in_virtual_time


def test_sleeps_take_virtual_time_only() -> None:
    async def work() -> tuple[float, list[str]]:
        order: list[str] = []

        async def sleeper(name: str, *seconds: float) -> None:
            for duration in seconds:
                await asyncio.sleep(duration)
                order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("a", 10, 10))
            tasks.create_task(sleeper("b", 5, 10, 1e6))
        return asyncio.get_running_loop().time(), order

    began = time.monotonic()
    now, order = run_in_virtual_time(work())
    assert time.monotonic() - began < 60
    assert now == 1_000_015
    assert order == ["b", "a", "b", "a", "b"]


def test_deadlines_end_waits() -> None:
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(work()) == 30


def test_short_timers_late_in_a_run_end() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3e9)  # where a double has steps of 5e-7 s
        for _ in range(10):
            await asyncio.sleep(1e-7)
            await asyncio.sleep(1e-3)
        return loop.time()

    assert run_in_virtual_time(work()) == pytest.approx(3e9 + 0.01, abs=1e-3)


def test_a_deadlock_says_who_waits_where() -> None:
    async def groups_to_be_ready() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        await asyncio.sleep(7)
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(groups_to_be_ready(), name=f"roll out {number}")

    with pytest.raises(RunError) as raised:
        run_in_virtual_time(work())
    message = str(raised.value)
    assert "stands still after 7 s" in message
    assert "roll out 0, roll out 1, roll out 2 and 2 more in " in message
    assert "groups_to_be_ready > Event.wait" in message
    assert "work > TaskGroup.__aexit__" in message
