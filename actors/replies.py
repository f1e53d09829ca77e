"""Waiting for Ray actors: with a deadline, and with our own errors instead of Ray's wrappers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import ObjectLostError, RayError, RayTaskError

from real_ray.errors import ActorDiedError, GroupLostError, RealRayError, first_error


async def reply(ref: Any, *, who: str, timeout_s: float, late: RealRayError) -> Any:
    """The value of an object reference.

    Args:
        who: name of the actor, for errors.
        late: raised when nothing came within ``timeout_s``.

    Raises:
        RealRayError: as the actor raised it.
        ActorDiedError: the actor's process is gone.
        GroupLostError: an argument of the call is gone, with the node that held it.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except RayTaskError as error:  # before TimeoutError, which may be its cause
        if isinstance(error.cause, ObjectLostError):
            raise GroupLostError(f"{who}: {_first_line(error.cause)}") from error
        if isinstance(error.cause, RealRayError):
            raise error.cause from error
        raise ActorDiedError(
            f"{who} failed: {type(error.cause).__name__}: {error.cause}"
        ) from error
    except ObjectLostError as error:
        raise GroupLostError(f"{who}: {_first_line(error)}") from error
    except RayError as error:  # of many kinds, such as those of its node or its memory
        raise ActorDiedError(f"{who} has died: {_first_line(error)}") from error
    except TimeoutError:
        raise late from None


async def replies(
    refs: Sequence[Any], *, who: Sequence[str], timeout_s: float, late: RealRayError
) -> list[Any]:
    """The values of several references; the first error ends the wait for all."""
    try:
        async with asyncio.TaskGroup() as tasks:
            waits = [
                tasks.create_task(reply(ref, who=name, timeout_s=timeout_s, late=late))
                for ref, name in zip(refs, who, strict=True)
            ]
    except* RealRayError as errors:
        raise first_error(errors) from errors
    return [wait.result() for wait in waits]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
