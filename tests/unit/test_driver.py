"""The driver on in-process fakes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from driver_runs import jitter, run
from fakes import (
    FakeBroadcaster,
    FakeGenerators,
    FakeLearner,
    FakeRewards,
    RecordingTracker,
    World,
    make_config,
)

from real_ray.checkpoint import DriverState
from real_ray.errors import (
    GenerationError,
    GroupLostError,
    LearnerError,
    RewardError,
    RunError,
    StalenessError,
    SyncError,
)
from real_ray.simulate.virtual_time import run_in_virtual_time
from real_ray.types import Prompt, RolloutTicket, SampledTicket, SyncReport, TrainResult


async def test_each_step_trains_then_broadcasts_then_goes_on() -> None:
    world = World()
    tracker = await run(make_config(run={"num_steps": 3}), world)
    assert world.log == [
        "broadcast 0",
        *["train 1", "broadcast 1", "train 2", "broadcast 2", "train 3", "broadcast 3"],
    ]
    assert [row["step"] for row in tracker.steps] == [1, 2, 3]
    assert [len(batch) for batch in world.batches] == [3, 3, 3]
    for key in ("reward/mean", "real/two_sided", "async/staleness_max", "time/generate"):
        assert key in tracker.steps[0]
    assert {"time/train", "time/sync"} <= tracker.steps[0].keys()
    assert [counts["trained"] for counts in tracker.ledgers] == [3, 6, 9, 9]


async def test_the_ledger_adds_up_whatever_the_groups_are_doing() -> None:
    class SlowRewards(FakeRewards):
        async def score(self, group: SampledTicket) -> RolloutTicket:
            for _ in range(15):
                await asyncio.sleep(0)
            return await super().score(group)

    world = World()
    tracker = await run(
        make_config(run={"num_steps": 12}, rollout={"max_staleness": 3}),
        world,
        generators=FakeGenerators(world, delay=jitter(0)),
        rewards=SlowRewards(world),
    )
    for counts in tracker.ledgers:
        assert counts["drawn"] == sum(counts.values()) - counts["drawn"]
    assert {counts["in flight"] for counts in tracker.ledgers[:-1]} > {0}


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
async def test_staleness_reaches_its_bound_and_never_passes_it(max_staleness: int) -> None:
    world = World()
    config = make_config(run={"num_steps": 12}, rollout={"max_staleness": max_staleness})
    tracker = await run(config, world)
    staleness = [row["async/staleness_max"] for row in tracker.steps]
    assert max(staleness) <= max_staleness
    assert staleness[-1] == max_staleness, "the pipeline is not used"
    assert world.most_in_pipeline <= config.num_slots


@pytest.mark.parametrize("seeds", [(1, 2), (3, 4)])
async def test_the_same_seed_trains_the_same_batches_whatever_the_timing(
    seeds: tuple[int, int],
) -> None:
    batches = []
    for seed in seeds:
        world = World()
        config = make_config(run={"num_steps": 10, "seed": 7}, rollout={"max_staleness": 2})
        await run(config, world, generators=FakeGenerators(world, delay=jitter(seed)))
        batches.append(world.batches)
    assert batches[0] == batches[1]
    other = World()
    await run(make_config(run={"num_steps": 10, "seed": 8}, rollout={"max_staleness": 2}), other)
    assert other.batches != batches[0]


async def test_no_prompt_is_lost_or_repeated_within_an_epoch() -> None:
    world = World()
    await run(make_config(run={"num_steps": 10}), world, num_prompts=30)
    trained = [uid for batch in world.batches for uid in batch]
    assert sorted(trained) == sorted(f"p:{i}@0" for i in range(30))


def test_the_time_of_a_checkpoint_is_part_of_the_next_step() -> None:
    class Learner(FakeLearner):
        async def save_checkpoint(self, directory: str, state: DriverState) -> None:
            await asyncio.sleep(5.0)

    async def scenario() -> RecordingTracker:
        world = World()
        learner = Learner(world)
        roles = {"learner": learner, "broadcaster": FakeBroadcaster(world, learner)}
        return await run(make_config(checkpoint={"save_steps": 2}), world, **roles)

    steps = run_in_virtual_time(scenario()).steps
    assert [row["time/checkpoint"] for row in steps] == [0.0, 0.0, 5.0, 0.0]
    assert [row["time/step"] for row in steps] == [0.0, 0.0, 5.0, 0.0]


async def test_a_failed_generation_is_tried_again() -> None:
    world = World()

    def fail_once(prompt: Prompt, attempt: int) -> Exception | None:
        return GenerationError(f"group {prompt.uid}: boom") if attempt == 1 else None

    generators = FakeGenerators(world, fail=fail_once)
    tracker = await run(make_config(data={"shuffle": False}), world, generators=generators)
    assert set(generators.attempts.values()) == {2}
    assert tracker.steps[-1]["async/failed"] == 0
    assert ("generation failed", "group p:0@0: boom (try 1)") in tracker.events


async def test_a_group_that_keeps_failing_is_accounted_for_and_replaced() -> None:
    world = World()

    def fail(prompt: Prompt, attempt: int) -> Exception | None:
        return GenerationError(f"{prompt.uid}: boom") if prompt.uid == "p:3@0" else None

    config = make_config(rollout={"max_retries": 1}, data={"shuffle": False})
    tracker = await run(config, world, generators=FakeGenerators(world, fail=fail))
    trained = [uid for batch in world.batches for uid in batch]
    assert len(trained) == 12
    assert "p:3@0" not in trained
    assert tracker.steps[-1]["async/failed"] == 1
    assert tracker.events == [
        ("generation failed", "p:3@0: boom (try 1)"),
        ("generation failed", "p:3@0: boom (try 2)"),
        ("group failed", "p:3@0: boom"),
    ]


async def test_a_reward_that_failed_is_tried_again() -> None:
    world = World()
    tried: list[str] = []

    def fails_once(uid: str) -> bool:
        tried.append(uid)
        return tried.count(uid) == 1

    config = make_config(rollout={"max_retries": 0}, reward={"max_retries": 1})
    tracker = await run(config, world, rewards=FakeRewards(world, poison=fails_once))
    assert len(world.batches) == 4
    assert {tried.count(uid) for uid in tried} == {2}
    assert {kind for kind, _ in tracker.events} == {"scoring failed"}
    assert tracker.steps[-1]["async/failed"] == 0


async def test_a_failing_reward_stops_the_run_with_its_own_words_if_asked_to() -> None:
    world = World()
    config = make_config(reward={"on_error": "stop"})
    with pytest.raises(RewardError, match=r"reward function f: group p:.*member 0: NaN"):
        await run(config, world, rewards=FakeRewards(world, poison=lambda uid: True))


async def test_a_failing_reward_drops_the_group_and_no_slot_leaks() -> None:
    world = World()
    poisoned = {f"p:{i}@0" for i in range(0, 40, 2)}
    config = make_config(run={"num_steps": 6}, data={"shuffle": False})
    tracker = await run(
        config, world, rewards=FakeRewards(world, poison=lambda uid: uid in poisoned)
    )
    trained = [uid for batch in world.batches for uid in batch]
    assert trained == [f"p:{i}@0" for i in range(1, 37, 2)]
    assert tracker.steps[-1]["async/failed"] >= 17


async def test_a_run_in_which_every_group_fails_ends() -> None:
    world = World()
    config = make_config(run={"max_consecutive_failures": 5}, reward={"on_error": "drop"})
    with pytest.raises(RunError, match=r"5 groups in a row.*max_consecutive_failures.*NaN"):
        await run(config, world, rewards=FakeRewards(world, poison=lambda uid: True))


async def test_an_error_of_any_role_ends_the_run_and_every_task() -> None:
    world = World()

    class BrokenLearner(FakeLearner):
        async def train(self, groups: list[RolloutTicket], *, policy_version: int) -> TrainResult:
            raise LearnerError("learner-1: out of memory")

    async def never(prompt: Prompt) -> None:
        if prompt.uid not in ("p:0@0", "p:1@0", "p:2@0"):
            await asyncio.Event().wait()

    learner = BrokenLearner(world)
    with pytest.raises(LearnerError, match="out of memory"):
        await run(
            make_config(data={"shuffle": False}),
            world,
            learner=learner,
            broadcaster=FakeBroadcaster(world, learner),
            generators=FakeGenerators(world, delay=never),
        )
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_the_learner_warns_of_becomes_an_event_and_the_run_goes_on() -> None:
    world = World()

    class SkippingLearner(FakeLearner):
        async def train(
            self, groups: Sequence[RolloutTicket], *, policy_version: int
        ) -> TrainResult:
            result = await super().train(groups, policy_version=policy_version)
            skipped = [f"step {policy_version}, {part}" for part in "ab"]
            warnings = tuple(skipped) if policy_version == 2 else ()
            return dataclasses.replace(result, warnings=warnings)

    learner = SkippingLearner(world)
    tracker = await run(
        make_config(run={"num_steps": 3}),
        world,
        learner=learner,
        broadcaster=FakeBroadcaster(world, learner),
    )
    assert tracker.events == [("step skipped", "step 2, a"), ("step skipped", "step 2, b")]
    assert world.log[-2:] == ["train 3", "broadcast 3"]
    assert [row["policy_version"] for row in tracker.steps] == [1, 2, 3]


async def test_a_sync_that_fails_ends_the_run() -> None:
    world = World()

    class BrokenBroadcaster(FakeBroadcaster):
        async def broadcast(self, *, policy_version: int) -> SyncReport:
            if policy_version == 2:
                raise SyncError("generator-0 holds version 1")
            return await super().broadcast(policy_version=policy_version)

    learner = FakeLearner(world)
    with pytest.raises(SyncError, match="generator-0 holds version 1"):
        await run(
            make_config(), world, learner=learner, broadcaster=BrokenBroadcaster(world, learner)
        )
    assert world.log[-1] == "train 2"


async def test_generators_that_miss_a_sync_are_noticed() -> None:
    """Skip the sync: the groups' own version spans give it away, not a counter of the driver."""
    world = World()

    class LazyBroadcaster(FakeBroadcaster):
        async def broadcast(self, *, policy_version: int) -> SyncReport:
            held = self.world.version
            report = await super().broadcast(policy_version=policy_version)
            self.world.version = max(held, 0)
            return report

    learner = FakeLearner(world)
    with pytest.raises(StalenessError, match="allowed 0 to 1"):
        await run(
            make_config(run={"num_steps": 8}),
            world,
            learner=learner,
            broadcaster=LazyBroadcaster(world, learner),
        )


@pytest.mark.parametrize(("times", "outcome"), [(1, "trained"), (3, "failed")])
async def test_a_group_whose_completions_are_lost_is_sampled_again(
    times: int, outcome: str
) -> None:
    world = World()
    lost: list[str] = []

    class Rewards(FakeRewards):
        async def score(self, group: SampledTicket) -> RolloutTicket:
            if group.uid == "p:4@0" and len(lost) < times:
                lost.append(group.uid)
                raise GroupLostError("reward-0: owner of the object has died")
            return await super().score(group)

    generators = FakeGenerators(world)
    config = make_config(data={"shuffle": False})
    tracker = await run(config, world, rewards=Rewards(world), generators=generators)
    assert generators.attempts["p:4@0"] == min(times + 1, 3)
    trained = [uid for batch in world.batches for uid in batch]
    assert ("p:4@0" in trained) is (outcome == "trained")
    assert tracker.ledgers[-1][outcome] == (12 if outcome == "trained" else 1)
    assert ("generation failed", "reward-0: owner of the object has died; it is sampled again") in (
        tracker.events
    )
