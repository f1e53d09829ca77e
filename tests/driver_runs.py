"""Runs of the driver on fakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from fakes import RecordingTracker, World, make_prompts, make_roles

from real_ray.checkpoint import DriverState
from real_ray.config import Config
from real_ray.driver import Driver
from real_ray.types import Prompt


def make_driver(
    config: Config,
    world: World,
    *,
    num_prompts: int = 50,
    num_eval: int = 0,
    tracker: RecordingTracker | None = None,
    resume: DriverState | None = None,
    **roles: object,
) -> Driver:
    return Driver(
        config,
        roles=make_roles(world, **roles),
        train=make_prompts(num_prompts),
        evaluation=make_prompts(num_eval),
        tracker=tracker or RecordingTracker(),
        resume=resume,
    )


async def run(config: Config, world: World, **arguments: object) -> RecordingTracker:
    """A whole run. ``arguments`` are those of `make_driver`."""
    tracker = RecordingTracker()
    driver = make_driver(config, world, tracker=tracker, **arguments)  # type: ignore[arg-type]
    await asyncio.wait_for(driver.run(), timeout=30)
    return tracker


def jitter(seed: int) -> Callable[[Prompt], Awaitable[None]]:
    """A delay that lets generations finish in any order."""
    rng = random.Random(seed)

    async def delay(prompt: Prompt) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)

    return delay
