"""A pool and a broadcaster around actors that a test has started itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes import RecordingTracker, make_config
from tiny_engine import engine_spec

from actors.learner_group import RayLearnerGroup
from actors.ray_generator import RayGenerator
from real_ray.activity import Activity
from real_ray.broadcaster import Broadcaster
from real_ray.config import LearnerConfig, LossConfig, SyncConfig
from real_ray.healing_pool import HealingPool
from real_ray.placement import Bundle
from real_ray.weights import Probe


class ReadyGenerator(RayGenerator):
    """Does not start its actor, and leaves its end to the test."""

    def __init__(self, index: int, actor: Any, *, timeout_s: float) -> None:
        name = f"generator-{index}"
        super().__init__(
            Bundle(actor=name, cpus=0.0, gpus=0),
            engine_spec(Path("none"), name=name),
            config=make_config(rollout={"timeout_s": timeout_s}, sync={"timeout_s": timeout_s}),
            env={},
            tell=lambda text: None,
        )
        self.actor = actor

    async def start(self) -> None: ...

    async def stop(self, *, at_once: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ready:
    pool: HealingPool
    learner: RayLearnerGroup
    broadcaster: Broadcaster
    tracker: RecordingTracker

    def admit_all(self) -> None:
        """As after a broadcast."""
        for member in self.pool.members():
            self.pool.admit(member)


@asynccontextmanager
async def ready(
    actors: Sequence[Any],
    ranks: Sequence[Any] = (),
    *,
    timeout_s: float = 60.0,
    probe: Probe | None = None,
    probe_tolerance: float = 0.1,
) -> AsyncIterator[Ready]:
    """A pool of these actors; ``ranks`` send their weights to them, and need no rendezvous."""

    async def no_rendezvous(_: int) -> Any:
        return None

    tracker = RecordingTracker()
    pool = HealingPool(
        lambda index, num_starts: ReadyGenerator(index, actors[index], timeout_s=timeout_s),
        config=make_config(rollout={"num_generators": len(actors)}).rollout,
        tracker=tracker,
        activity=Activity(),
    )
    learner = RayLearnerGroup(
        ranks,
        config=LearnerConfig(timeout_s=60.0),
        loss=LossConfig(),
        rendezvous=no_rendezvous,
    )
    broadcaster = Broadcaster(
        pool,
        learner,
        config=SyncConfig(probe_tolerance=probe_tolerance, probe=probe is not None),
        probe=probe,
        tracker=tracker,
        activity=Activity(),
    )
    keeping = asyncio.create_task(pool.run())
    try:
        await pool.has_begun()
        yield Ready(pool=pool, learner=learner, broadcaster=broadcaster, tracker=tracker)
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
