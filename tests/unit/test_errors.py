from __future__ import annotations

import asyncio

import pytest

from real_ray.errors import RewardError, SyncError, first_error


def test_the_first_error_of_a_group_is_found_at_any_depth() -> None:
    first, second = RewardError("first"), SyncError("second")
    flat = ExceptionGroup("flat", [first, second])
    assert first_error(flat) is first
    assert first_error(ExceptionGroup("outer", [flat, ValueError()])) is first


async def test_what_a_task_group_raises_is_what_its_task_raised() -> None:
    error = SyncError("generator-1 holds version 3")

    async def fail() -> None:
        raise error

    async def work() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(3600))
            inner.create_task(fail())

    with pytest.raises(ExceptionGroup) as raised:
        await work()
    assert first_error(raised.value) is error
