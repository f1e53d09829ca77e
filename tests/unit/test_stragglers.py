"""Groups that are late: waited for, or given up and replaced."""

from __future__ import annotations

import asyncio

import pytest
from driver_runs import make_driver, run
from fakes import FakeGenerators, RecordingTracker, World, make_config

from real_ray.errors import RunError
from real_ray.types import Prompt

LATE = "p:4@0"


async def test_a_straggler_is_aborted_accounted_for_and_replaced() -> None:
    world = World()
    aborted = []

    async def delay(prompt: Prompt) -> None:
        if prompt.uid != LATE:
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            aborted.append(prompt.uid)
            raise

    config = make_config(
        data={"shuffle": False}, rollout={"straggler": "evict", "straggler_s": 0.01}
    )
    tracker = await run(config, world, generators=FakeGenerators(world, delay=delay))
    assert aborted == [LATE]
    trained = [uid for batch in world.batches for uid in batch]
    assert trained == [f"p:{i}@0" for i in range(13) if i != 4], "the order is that of the draws"
    assert tracker.ledgers[-1]["evicted"] == tracker.steps[-1]["async/evicted"] == 1
    assert tracker.ledgers[-1]["drawn"] == 13
    late = "group p:4@0: not scored 0.01 s after its start (rollout.straggler_s)"
    assert tracker.events == [("straggler", f"{late}, evict"), ("group evicted", late)]


async def test_a_straggler_that_is_waited_for_is_reported_and_trained_on_within_the_bound() -> None:
    world = World()
    reported = asyncio.Event()

    class Watching(RecordingTracker):
        def event(self, kind: str, text: str) -> None:
            super().event(kind, text)
            if kind == "straggler":
                reported.set()

    async def delay(prompt: Prompt) -> None:
        if prompt.uid == LATE:
            await reported.wait()

    tracker = Watching()
    config = make_config(
        data={"shuffle": False}, rollout={"straggler": "wait", "straggler_s": 0.01}
    )
    driver = make_driver(
        config, world, tracker=tracker, generators=FakeGenerators(world, delay=delay)
    )
    await asyncio.wait_for(driver.run(), timeout=30)
    assert [uid for batch in world.batches for uid in batch] == [f"p:{i}@0" for i in range(12)]
    assert [kind for kind, _ in tracker.events] == ["straggler"]
    assert max(row["async/staleness_max"] for row in tracker.steps) == 1
    assert world.most_in_pipeline <= config.num_slots


async def test_a_reward_worker_that_is_late_evicts_its_group_too() -> None:
    world = World()

    class Stuck:
        async def score(self, group: object) -> None:
            await asyncio.Event().wait()

    config = make_config(
        run={"max_consecutive_failures": 4}, rollout={"straggler": "evict", "straggler_s": 0.01}
    )
    with pytest.raises(RunError, match=r"4 groups in a row.*rollout.straggler_s"):
        await run(config, world, rewards=Stuck())
