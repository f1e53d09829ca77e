"""A run that is killed and goes on trains on what the unbroken run trains on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from driver_runs import jitter, make_driver, run
from fakes import (
    FakeBroadcaster,
    FakeGenerators,
    FakeLearner,
    FakeRewards,
    RecordingTracker,
    World,
    make_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from real_ray.checkpoint import DriverState
from real_ray.config import Config
from real_ray.driver import Driver
from real_ray.errors import CheckpointError, GenerationError
from real_ray.types import Prompt, RolloutTicket, TrainResult


def is_one_sided(uid: str) -> bool:
    return int(uid.removeprefix("p:").partition("@")[0]) % 2 == 0


def fails(prompt: Prompt, attempt: int) -> Exception | None:
    number = int(prompt.uid.removeprefix("p:").partition("@")[0])
    return GenerationError(f"{prompt.uid}: boom") if number % 7 == 5 else None


class SlowLearner(FakeLearner):
    """Trains for so long that groups of several steps wait for it."""

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        for _ in range(40):
            await asyncio.sleep(0)
        return await super().train(groups, policy_version=policy_version)


def roles(world: World, *, seed: int = 0, version: int = 0) -> dict[str, object]:
    """Finishes in any order; every seventh prompt fails and every second is one-sided."""
    learner = SlowLearner(world, version=version)
    return {
        "generators": FakeGenerators(world, delay=jitter(seed), fail=fails),
        "rewards": FakeRewards(world, one_sided=is_one_sided),
        "learner": learner,
        "broadcaster": FakeBroadcaster(world, learner),
    }


async def killed_after(turns: int | None, driver: Driver) -> None:
    """Run until the event loop has turned so often, then drop everything; None: to the end."""
    task = asyncio.create_task(driver.run())
    if turns is not None:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    else:
        await task


CONFIGS = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries(
            {"num_steps": st.just(12), "num_epochs": st.sampled_from([None, 2])}
        ),
        "rollout": st.fixed_dictionaries(
            {
                "num_generations": st.just(2),
                "max_staleness": st.integers(0, 3),
                "max_retries": st.just(0),
                "dynamic_sampling": st.booleans(),
                "max_resample_times": st.sampled_from([0.4, 0.7, 3.0]),
            }
        ),
        "checkpoint": st.fixed_dictionaries({"save_steps": st.integers(1, 3)}),
        "data": st.fixed_dictionaries({"drop_last": st.booleans()}),
    }
)


@settings(deadline=None)
@given(
    sections=CONFIGS,
    kills=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_run_killed_at_any_point_trains_on_the_same_groups(
    sections: dict[str, dict[str, object]], kills: list[int], seed: int
) -> None:
    config = make_config(**sections)

    async def scenario() -> None:
        unbroken = World()
        await run(config, unbroken, num_prompts=20, **roles(unbroken))

        done: list[list[str]] = []  # batches up to the newest checkpoint
        state: DriverState | None = None
        for number, turns in enumerate([*kills, None]):
            world, version = World(), state.policy_version if state else 0
            parts = roles(world, seed=seed + number, version=version)
            await killed_after(
                turns, make_driver(config, world, num_prompts=20, resume=state, **parts)
            )
            if turns is None:
                done += world.batches
            elif world.checkpoints:
                state = world.checkpoints[-1]
                done += world.batches[: state.policy_version - version]
        assert done == unbroken.batches

    asyncio.run(scenario())


async def saved_run(config: Config) -> tuple[World, DriverState]:
    world = World()
    await run(config, world)
    return world, world.checkpoints[0]


SAVING = {"checkpoint": {"save_steps": 2}, "rollout": {"num_generations": 2, "max_staleness": 2}}


async def run_on(
    config: Config, state: DriverState, *, num_eval: int = 0
) -> tuple[World, FakeGenerators, RecordingTracker]:
    """Go on from a state to the end."""
    world = World()
    generators, learner = FakeGenerators(world), FakeLearner(world, version=state.policy_version)
    tracker = await run(
        config,
        world,
        resume=state,
        num_eval=num_eval,
        generators=generators,
        learner=learner,
        broadcaster=FakeBroadcaster(world, learner),
    )
    return world, generators, tracker


async def test_generators_get_the_current_weights_first_and_versions_go_on() -> None:
    config = make_config(**SAVING)
    _, state = await saved_run(config)
    world, _, tracker = await run_on(config, state)
    assert world.log[:3] == ["broadcast 2", "train 3", "broadcast 3"]
    assert [row["step"] for row in tracker.steps] == [3, 4]
    assert tracker.ledgers[-1]["drawn"] == 12, "no more than the run trains on"


async def test_buffered_groups_are_trained_on_and_not_sampled_again() -> None:
    config = make_config(**SAVING)
    _, state = await saved_run(config)
    buffered = {b.group.uid for b in state.buffered}
    assert buffered
    world, generators, _ = await run_on(config, state)
    assert buffered <= {uid for batch in world.batches for uid in batch}
    assert not buffered & generators.attempts.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"num_generations": 4}},
        {"rollout": {"temperature": 1.0}},
        {"rollout": {"max_completion_length": 100}},
        {"rollout": {"max_staleness": 0}},
        {"reward": {"function": "rewards:other"}},
    ],
)
async def test_buffered_groups_that_do_not_fit_the_config_any_more_are_drawn_again(
    changes: dict[str, dict[str, object]],
) -> None:
    _, state = await saved_run(make_config(**SAVING))
    buffered = {b.group.uid for b in state.buffered if b.group.sampled.oldest_version < 2}
    assert buffered
    rollout = {**SAVING["rollout"], **changes.get("rollout", {})}
    config = make_config(**{**SAVING, **changes, "rollout": rollout})
    world, generators, tracker = await run_on(config, state)
    assert buffered <= {uid for batch in world.batches for uid in batch}
    assert buffered <= generators.attempts.keys()
    told = [text for kind, text in tracker.events if kind == "buffered group drawn again"]
    assert all(any(f"group {uid} " in text for text in told) for uid in buffered)
    bound = config.rollout.max_staleness
    assert max(row["async/staleness_max"] for row in tracker.steps) <= bound


async def test_a_buffered_group_is_too_old_if_it_would_be_in_its_turn() -> None:
    """Groups of two steps are buffered, of which those of the second would wait one step more."""
    world = World()
    await run(make_config(**SAVING), world, **roles(world))
    state = world.checkpoints[0]
    assert len(state.buffered) > 3
    rollout = {**SAVING["rollout"], "max_staleness": 1}
    _, generators, tracker = await run_on(make_config(**{**SAVING, "rollout": rollout}), state)
    assert {b.group.uid for b in state.buffered} & generators.attempts.keys()
    assert max(row["async/staleness_max"] for row in tracker.steps) <= 1


@pytest.mark.parametrize(
    "changes", [{"run": {"num_steps": 4, "seed": 1}}, {"data": {"shuffle": False}}]
)
async def test_other_prompts_or_another_order_are_refused(
    changes: dict[str, dict[str, object]],
) -> None:
    _, state = await saved_run(make_config(**SAVING))
    with pytest.raises(CheckpointError, match=r"version 2.*other training prompts.*arithmetic"):
        make_driver(make_config(**{**SAVING, **changes}), World(), resume=state)


async def test_what_was_evicted_or_failed_is_not_drawn_again() -> None:
    """Else the prompt that wedged a step would wedge it again after each restart."""
    config = make_config(
        run={"num_steps": 4},
        data={"shuffle": False},
        checkpoint={"save_steps": 2},
        rollout={"straggler": "evict", "straggler_s": 0.01, "max_retries": 0},
    )
    world = World()

    async def delay(prompt: Prompt) -> None:
        if prompt.uid == "p:1@0":
            await asyncio.Event().wait()

    def fail(prompt: Prompt, attempt: int) -> Exception | None:
        return GenerationError("boom") if prompt.uid == "p:3@0" else None

    await run(config, world, generators=FakeGenerators(world, delay=delay, fail=fail))
    again, generators, tracker = await run_on(config, world.checkpoints[0])
    assert not {"p:1@0", "p:3@0"} & generators.attempts.keys()
    assert again.batches == world.batches[2:]
    ledger = tracker.ledgers[-1]
    assert (ledger["evicted"], ledger["failed"], ledger["trained"]) == (1, 1, 12)


async def test_a_run_whose_steps_are_done_trains_nothing_more() -> None:
    config = make_config(**SAVING)
    world, _ = await saved_run(config)
    last = world.checkpoints[-1]
    assert last.policy_version == 4
    again, _, tracker = await run_on(config, last)
    assert again.log == ["broadcast 4"]
    assert tracker.ledgers[-1]["trained"] == 12


async def test_an_evaluation_that_was_due_with_the_checkpoint_is_made() -> None:
    """It had only just begun when the checkpoint was saved."""
    config = make_config(**SAVING, eval={"every": 2, "at_end": False})
    _, state = await saved_run(config)
    _, _, tracker = await run_on(config, state, num_eval=3)
    assert [version for version, *_ in tracker.evaluations] == [2, 4]
