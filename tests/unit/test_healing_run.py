"""The driver with a pool that heals and a broadcaster that verifies: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_generators import START_S, FakeSender, Generators
from fakes import FakeRewards, World, make_config, make_prompts

from real_ray.activity import Activity
from real_ray.broadcaster import Broadcaster
from real_ray.checkpoint import DriverState
from real_ray.driver import Driver
from real_ray.roles import Roles
from real_ray.simulate.virtual_time import run_in_virtual_time
from real_ray.types import RolloutTicket, TrainResult

STEP_S = 1.0  # less than an evaluation takes


@dataclass
class Learner(FakeSender):
    """Trains for `STEP_S`."""

    trained: list[list[str]] = field(default_factory=list)

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        async with self.lock:
            self.policy_version = policy_version
            await asyncio.sleep(STEP_S)
            self.weights += 1
        self.trained.append([group.uid for group in groups])
        return TrainResult(policy_version=policy_version, metrics={}, samples=())

    async def save(self, directory: str) -> None: ...

    async def save_checkpoint(self, directory: str, state: DriverState) -> None: ...


def test_an_evaluation_does_not_wait_for_generators_that_wait_for_its_end() -> None:
    async def work() -> None:
        config = make_config(
            run={"num_steps": 4},
            data={"shuffle": False},
            eval={"every": 2, "num_prompts": 40, "at_start": False, "at_end": False},
        )
        generators = Generators(config.rollout)
        learner = Learner()
        driver = Driver(
            config,
            roles=Roles(
                generators=generators.pool,
                rewards=FakeRewards(World()),
                learner=learner,
                broadcaster=Broadcaster(
                    generators.pool,
                    learner,  # type: ignore[arg-type]
                    config=config.sync,
                    probe=None,
                    tracker=generators.tracker,
                    activity=Activity(),
                ),
            ),
            train=make_prompts(50),
            evaluation=make_prompts(40),
            tracker=generators.tracker,
        )

        def evaluates_and_has_trained() -> bool:
            return len(learner.trained) == 3 and generators.made[0].num_running > 0

        keeping = asyncio.create_task(generators.pool.run())
        await generators.pool.has_begun()
        running = asyncio.create_task(driver.run())
        while not (evaluates_and_has_trained() or running.done()):  # noqa: ASYNC110 - virtual
            await asyncio.sleep(0.1)
        assert not running.done()
        generators.made[0].die()
        await asyncio.wait_for(running, 100 * START_S)
        assert [uid for step in learner.trained for uid in step] == [f"p:{i}@0" for i in range(12)]
        assert any(kind == "generator healed" for kind, _ in generators.tracker.events)
        # What it made after that is of the next version, and no answer of this one.
        left_out = [t for k, t in generators.tracker.events if k == "evaluation prompt left out"]
        assert left_out
        assert all("no generator has policy version 2 any more" in text for text in left_out)
        counted = {version: num for version, _, num in generators.tracker.evaluations}
        assert counted.get(2, 0) + len(left_out) == 40
        keeping.cancel()
        await asyncio.wait({keeping})

    run_in_virtual_time(asyncio.wait_for(work(), 50_000))
