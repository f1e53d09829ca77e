"""Evaluation while training goes on."""

from __future__ import annotations

import asyncio

import pytest
from driver_runs import make_driver, run
from fakes import (
    FakeBroadcaster,
    FakeGenerators,
    FakeLearner,
    FakeRewards,
    RecordingTracker,
    World,
    make_config,
)

from real_ray.errors import GenerationError, RewardError
from real_ray.types import Prompt, SyncReport


def is_evaluated(prompt: Prompt) -> bool:
    return "@" not in prompt.uid  # `PromptCursor` adds the epoch


async def test_before_and_after_with_the_version_it_measured() -> None:
    tracker = await run(make_config(eval={"num_prompts": 4}), World(), num_eval=9)
    assert tracker.evaluations == [(0, 1.0, 4), (4, 1.0, 4)]
    config = make_config(eval={"at_start": False, "at_end": False})
    tracker = await run(config, World(), num_eval=9)
    assert tracker.evaluations == []


@pytest.mark.parametrize(
    ("evaluation", "versions"),
    [
        ({"every": 2}, [0, 2, 4]),  # the last one is not made twice
        ({"every": 3}, [0, 3, 4]),
        ({"every": 1, "at_start": False, "at_end": False}, [1, 2, 3, 4]),
    ],
)
async def test_every_so_many_steps(evaluation: dict[str, object], versions: list[int]) -> None:
    tracker = await run(make_config(eval=evaluation), World(), num_eval=3)
    assert tracker.evaluations == [(version, 1.0, 3) for version in versions]


async def test_the_weights_stay_until_it_is_done_while_training_goes_on() -> None:
    world = World()
    trained = asyncio.Event()
    seen = []

    class Learner(FakeLearner):
        async def train(self, groups, *, policy_version: int):  # type: ignore[no-untyped-def]
            result = await super().train(groups, policy_version=policy_version)
            if policy_version == 2:
                trained.set()
            return result

    async def delay(prompt: Prompt) -> None:
        if is_evaluated(prompt) and world.version == 1:
            await trained.wait()  # step 2 is trained while version 1 is evaluated
            for _ in range(50):  # and its weights would be sent now
                await asyncio.sleep(0)
            seen.append(world.version)

    learner = Learner(world)
    tracker = await run(
        make_config(eval={"every": 1}),
        world,
        num_eval=3,
        generators=FakeGenerators(world, delay=delay),
        learner=learner,
        broadcaster=FakeBroadcaster(world, learner),
    )
    assert seen == [1, 1, 1]
    assert [version for version, *_ in tracker.evaluations] == [0, 1, 2, 3, 4]
    assert [len(batch) for batch in world.batches] == [3, 3, 3, 3]
    assert tracker.steps[1]["time/evaluate"] > 0


async def test_training_groups_are_sampled_while_an_evaluation_runs() -> None:
    world = World()
    sampled_all = asyncio.Event()

    async def delay(prompt: Prompt) -> None:
        if is_evaluated(prompt):
            await sampled_all.wait()

    class Rewards(FakeRewards):
        async def score(self, group):  # type: ignore[no-untyped-def]
            if group.uid == "p:2@0":
                sampled_all.set()
            return await super().score(group)

    generators = FakeGenerators(world, delay=delay)
    await run(
        make_config(run={"num_steps": 1}, data={"shuffle": False}),
        world,
        num_eval=2,
        generators=generators,
        rewards=Rewards(world),
    )
    assert len(world.batches[0]) == 3


async def test_a_generation_that_fails_is_tried_again() -> None:
    def fail_once(prompt: Prompt, attempt: int) -> Exception | None:
        return GenerationError("boom") if is_evaluated(prompt) and attempt == 1 else None

    world = World()
    config = make_config(eval={"at_end": False}, rollout={"max_retries": 1})
    generators = FakeGenerators(world, fail=fail_once)
    tracker = await run(config, world, num_eval=3, generators=generators)
    assert tracker.evaluations == [(0, 1.0, 3)]


async def test_prompts_that_fail_are_left_out_and_told_of() -> None:
    def fail(prompt: Prompt, attempt: int) -> Exception | None:
        return GenerationError("p:1: boom") if prompt.uid == "p:1" else None

    world = World()
    generators = FakeGenerators(world, fail=fail)
    config = make_config(eval={"at_end": False}, reward={"on_error": "drop"})
    tracker = await run(config, world, num_eval=3, generators=generators)
    assert tracker.evaluations == [(0, 1.0, 2)]
    assert ("evaluation prompt left out", "p:1: boom") in tracker.events


async def test_a_reward_that_fails_stops_the_run_as_in_training() -> None:
    world = World()
    rewards = FakeRewards(world, poison=lambda uid: uid == "p:1")
    config = make_config(reward={"on_error": "stop"})
    with pytest.raises(RewardError, match="group p:1, member 0"):
        await run(config, world, num_eval=3, rewards=rewards)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_run_never_ends_in_the_middle_of_one() -> None:
    world = World()
    tracker = RecordingTracker()
    ended = asyncio.Event()

    async def delay(prompt: Prompt) -> None:
        if is_evaluated(prompt) and world.version == 4:
            await ended.wait()

    class Broadcaster(FakeBroadcaster):
        async def broadcast(self, *, policy_version: int) -> SyncReport:
            report = await super().broadcast(policy_version=policy_version)
            if policy_version == 4:
                asyncio.get_running_loop().call_later(0.01, ended.set)
            return report

    learner = FakeLearner(world)
    driver = make_driver(
        make_config(eval={"every": 4, "at_end": False}),
        world,
        num_eval=2,
        tracker=tracker,
        generators=FakeGenerators(world, delay=delay),
        learner=learner,
        broadcaster=Broadcaster(world, learner),
    )
    await asyncio.wait_for(driver.run(), timeout=30)
    assert tracker.evaluations[-1] == (4, 1.0, 2)
