"""Further tries of what may succeed the next time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from real_ray.errors import RunError
from real_ray.tracking import Tracker

Result = TypeVar("Result")


async def with_retries(
    attempt: Callable[[], Awaitable[Result]],
    *,
    on: type[RunError],
    max_retries: int,
    tracker: Tracker,
    event: str,
) -> Result:
    """The result of the first attempt that does not end with an error of the kind ``on``.

    Args:
        max_retries: attempts after the first one.
        event: kind of the event that tells of each failed attempt.

    Raises:
        RunError: that of the last attempt, if all failed.
    """
    number = 0
    while True:
        number += 1
        try:
            return await attempt()
        except on as error:
            tracker.event(event, f"{error} (try {number})")
            if number > max_retries:
                raise
