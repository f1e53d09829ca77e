"""One-sided groups are replaced, up to a bound, and nothing else is thrown away."""

from __future__ import annotations

import pytest
from driver_runs import jitter, run
from fakes import FakeGenerators, FakeRewards, RecordingTracker, World, make_config

from real_ray.config import Config

NUM_STEPS = 5


def number(uid: str) -> int:
    return int(uid.removeprefix("p:").partition("@")[0])


def sampling_config(**rollout: object) -> Config:
    return make_config(
        run={"num_steps": NUM_STEPS},
        data={"shuffle": False},
        rollout={"dynamic_sampling": True, "max_staleness": 1, **rollout},
    )


async def run_with(
    config: Config, *, every: int, seed: int = 0
) -> tuple[World, RecordingTracker, list[str]]:
    """Of every so many prompts one is one-sided (1: all); returns also what was trained on."""
    world = World()
    tracker = await run(
        config,
        world,
        generators=FakeGenerators(world, delay=jitter(seed)),
        rewards=FakeRewards(world, one_sided=lambda uid: number(uid) % every == 0),
    )
    return world, tracker, [uid for batch in world.batches for uid in batch]


@pytest.mark.parametrize("seed", range(3))
async def test_batches_hold_as_many_two_sided_groups_as_a_step_asks_for(seed: int) -> None:
    world, tracker, trained = await run_with(sampling_config(), every=2, seed=seed)
    assert [len(batch) for batch in world.batches] == [3] * NUM_STEPS
    assert trained == [f"p:{i}@0" for i in range(1, 30, 2)]
    ledger = tracker.ledgers[-1]
    assert (ledger["trained"], ledger["filtered"], ledger["drawn"]) == (15, 15, 30)
    assert tracker.steps[-1]["async/filtered"] == 15
    assert not tracker.events


async def test_at_the_bound_the_step_trains_on_what_it_has_and_says_so() -> None:
    _, tracker, trained = await run_with(sampling_config(max_resample_times=2 / 3), every=1)
    # Two are replaced for each step of three, and the next three are taken as they are.
    assert trained == [f"p:{i}@0" for i in range(25) if i % 5 >= 2]
    assert tracker.ledgers[-1]["filtered"] == 2 * NUM_STEPS
    kinds = [kind for kind, _ in tracker.events]
    assert kinds == ["dynamic sampling"] * NUM_STEPS
    assert tracker.events[0][1] == (
        "step 1 trained on 3 one-sided of 3 groups: 2 were replaced (rollout.max_resample_times)"
    )


async def test_however_low_the_bound_is_one_group_of_a_step_may_be_replaced() -> None:
    _, tracker, _ = await run_with(sampling_config(max_resample_times=0.1), every=1)
    assert tracker.ledgers[-1]["filtered"] == NUM_STEPS
    assert "3 groups: 1 were replaced" in tracker.events[0][1]


async def test_surplus_stays_queued_and_the_staleness_bound_holds() -> None:
    for oversample in (1.0, 4 / 3, 5 / 3, 2.0):
        config = sampling_config(oversample=oversample)
        world, tracker, trained = await run_with(config, every=4)
        assert trained == [f"p:{i}@0" for i in range(20) if i % 4], "nothing was thrown away"
        assert max(row["async/staleness_max"] for row in tracker.steps) <= 1
        assert world.most_in_pipeline <= round(3 * oversample)
        assert tracker.ledgers[-1]["drawn"] == 20


async def test_accepted_groups_are_trained_on_when_the_data_ends_before_the_step_is_full() -> None:
    """The last groups of the data are one-sided: two accepted ones of three make the last step."""
    config = make_config(
        run={"num_steps": 4, "num_epochs": 1},
        data={"shuffle": False},
        rollout={"dynamic_sampling": True},
    )
    world = World()
    tracker = await run(
        config,
        world,
        num_prompts=10,
        rewards=FakeRewards(world, one_sided=lambda uid: number(uid) >= 5),
    )
    assert world.batches == [["p:0@0", "p:1@0", "p:2@0"], ["p:3@0", "p:4@0"]]
    assert tracker.ledgers[-1]["filtered"] == 5
    assert [kind for kind, _ in tracker.events] == ["end of the data"]


async def test_synchronous_dynamic_sampling_is_synchronous_to_the_token() -> None:
    _, tracker, trained = await run_with(sampling_config(max_staleness=0), every=2)
    assert trained == [f"p:{i}@0" for i in range(1, 30, 2)]
    assert {row["async/staleness_max"] for row in tracker.steps} == {0}


async def test_without_it_one_sided_groups_are_trained_on() -> None:
    _, tracker, trained = await run_with(sampling_config(dynamic_sampling=False), every=2)
    assert trained == [f"p:{i}@0" for i in range(15)]
    assert tracker.ledgers[-1]["filtered"] == 0
