"""A run that is told to stop, and one that loses its generators: no group is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from driver_runs import make_driver, run
from fakes import FakeGenerators, FakeLearner, RecordingTracker, World, make_config
from hypothesis import given
from hypothesis import strategies as st

from real_ray.errors import GeneratorsLostError
from real_ray.types import Prompt, RolloutTicket, TrainResult


@dataclass
class Gate:
    """Holds generations back until it is opened."""

    closed_for: set[str] = field(default_factory=set)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)

    async def delay(self, prompt: Prompt) -> None:
        await asyncio.sleep(0)
        if prompt.uid not in self.closed_for:
            return
        self.waiting.add(prompt.uid)
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.add(prompt.uid)
            raise


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the fakes have no events
            await asyncio.sleep(0)


CONFIG = make_config(run={"num_steps": 6}, data={"shuffle": False}, checkpoint={"save_steps": None})


async def test_groups_under_way_finish_within_the_grace_and_are_in_the_checkpoint() -> None:
    world, gate = World(), Gate({"p:7@0"})
    tracker = RecordingTracker()
    driver = make_driver(
        CONFIG, world, tracker=tracker, generators=FakeGenerators(world, delay=gate.delay)
    )
    running = asyncio.create_task(driver.run())
    await until(lambda: len(world.batches) == 2 and gate.waiting)
    driver.stop(grace_s=60)
    drawn = driver.policy_version
    gate.opened.set()
    assert await running is False
    (saved,) = world.checkpoints
    assert saved.policy_version == 2 >= drawn
    assert [b.group.uid for b in saved.buffered] == [f"p:{i}@0" for i in range(6, 12)]
    assert tracker.events[-1][0] == "checkpoint saved"
    assert tracker.ledgers[-1]["in flight"] == 0
    assert len(world.batches) == 2, "no further step"


async def test_groups_that_take_longer_are_returned_and_drawn_again() -> None:
    world, gate = World(), Gate({"p:7@0"})
    driver = make_driver(CONFIG, world, generators=FakeGenerators(world, delay=gate.delay))
    running = asyncio.create_task(driver.run())
    await until(lambda: len(world.batches) == 2 and gate.waiting)
    driver.stop(grace_s=0.01)
    assert await running is False
    assert gate.cancelled == {"p:7@0"}
    (saved,) = world.checkpoints
    assert "p:7@0" not in {b.group.uid for b in saved.buffered}
    again = World(version=2)
    await run(CONFIG, again, resume=saved, learner=FakeLearner(again, version=2))
    trained = [uid for batch in world.batches + again.batches for uid in batch]
    assert trained == [f"p:{i}@0" for i in range(18)]


async def test_the_step_under_way_is_finished() -> None:
    world = World()
    training = asyncio.Event()

    class Slow(FakeLearner):
        async def train(self, groups: list[RolloutTicket], *, policy_version: int) -> TrainResult:
            if policy_version == 3:
                training.set()
                for _ in range(20):
                    await asyncio.sleep(0)
            return await super().train(groups, policy_version=policy_version)

    learner = Slow(world)
    driver = make_driver(CONFIG, world, learner=learner)
    running = asyncio.create_task(driver.run())
    await training.wait()
    driver.stop(grace_s=60)
    assert await running is False
    assert world.checkpoints[-1].policy_version == 3
    assert "broadcast 3" in world.log


async def test_a_checkpoint_that_was_just_saved_is_not_saved_again() -> None:
    world = World()
    config = make_config(run={"num_steps": 6}, checkpoint={"save_steps": 2})

    class Stops(RecordingTracker):
        def event(self, kind: str, text: str) -> None:
            super().event(kind, text)
            if kind == "checkpoint saved":
                driver.stop(grace_s=0)

    driver = make_driver(config, world, tracker=Stops())
    assert await driver.run() is False
    assert [state.policy_version for state in world.checkpoints] == [2]


async def test_a_run_that_has_learned_nothing_yet_saves_nothing() -> None:
    world = World()
    driver = make_driver(CONFIG, world)
    driver.stop(grace_s=0)
    assert await driver.run() is False
    assert world.checkpoints == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_evaluation_is_given_up() -> None:
    world, gate = World(), Gate({"p:0"})
    tracker = RecordingTracker()
    driver = make_driver(
        CONFIG,
        world,
        num_eval=2,
        tracker=tracker,
        generators=FakeGenerators(world, delay=gate.delay),
    )
    running = asyncio.create_task(driver.run())
    await until(lambda: gate.waiting and world.batches)
    driver.stop(grace_s=60)
    assert await running is False
    assert ("evaluation given up", "the run stops") in tracker.events
    assert tracker.evaluations == []


async def test_without_generators_the_run_saves_what_it_has_and_fails() -> None:
    world = World()

    class Mortal(FakeGenerators):
        async def watch(self) -> None:
            await until(lambda: len(world.batches) == 2 and "p:7@0" in gate.waiting)
            raise GeneratorsLostError("0 generators for 10 s")

    gate = Gate({"p:7@0"})
    driver = make_driver(CONFIG, world, generators=Mortal(world, delay=gate.delay))
    with pytest.raises(GeneratorsLostError, match="0 generators for 10 s"):
        await driver.run()
    assert world.checkpoints[-1].policy_version == 2
    assert gate.cancelled == {"p:7@0"}
    assert asyncio.all_tasks() == {asyncio.current_task()}


@given(st.integers(0, 400), st.integers(0, 3), st.integers(0, 2))
async def test_whenever_it_is_stopped_every_prompt_is_trained_on_once(
    ticks: int, num_gated: int, max_staleness: int
) -> None:
    config = make_config(
        run={"num_steps": 6},
        data={"shuffle": False},
        rollout={"max_staleness": max_staleness},
        checkpoint={"save_steps": 4},
    )
    world, gate = World(), Gate({f"p:{i}@0" for i in range(5, 5 + num_gated)})
    driver = make_driver(config, world, generators=FakeGenerators(world, delay=gate.delay))
    running = asyncio.create_task(driver.run())
    for _ in range(ticks):
        await asyncio.sleep(0)
    driver.stop(grace_s=0)
    gate.opened.set()
    finished = await asyncio.wait_for(running, 10)
    batches = world.batches
    if not finished and world.checkpoints:
        saved = world.checkpoints[-1]
        assert saved.policy_version == len(world.batches)
        again = World(version=saved.policy_version)
        learner = FakeLearner(again, version=saved.policy_version)
        await run(config, again, resume=saved, learner=learner)
        batches = batches + again.batches
    elif not finished:
        assert batches == []
        return
    assert [uid for batch in batches for uid in batch] == [f"p:{i}@0" for i in range(18)]
