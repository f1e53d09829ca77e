"""The end of the data: epochs, the last batch, datasets smaller than a batch."""

from __future__ import annotations

import pytest
from driver_runs import run
from fakes import FakeGenerators, World, make_config

from real_ray.config import Config
from real_ray.errors import GenerationError
from real_ray.run_length import with_num_steps
from real_ray.types import Prompt


def epochs(num_epochs: int | None, num_prompts: int, **data: object) -> Config:
    run = {"num_steps": None, "num_epochs": num_epochs}
    config = make_config(run=run, data={"shuffle": False, **data})
    return with_num_steps(config, num_prompts=num_prompts)


@pytest.mark.parametrize(
    ("num_epochs", "num_prompts", "drop_last", "sizes"),
    [
        (None, 7, False, [3, 3, 1]),
        (None, 7, True, [3, 3]),
        (2, 7, False, [3, 3, 3, 3, 2]),
        (2, 7, True, [3, 3, 3, 3]),
        (1, 2, False, [2]),
        (3, 1, False, [3]),
        (2, 6, False, [3, 3, 3, 3]),
    ],
)
async def test_each_prompt_is_trained_on_once_an_epoch_and_the_run_ends(
    num_epochs: int | None, num_prompts: int, drop_last: bool, sizes: list[int]
) -> None:
    world = World()
    config = epochs(num_epochs, num_prompts, drop_last=drop_last)
    tracker = await run(config, world, num_prompts=num_prompts)
    assert [len(batch) for batch in world.batches] == sizes
    uids = [f"p:{i}@{epoch}" for epoch in range(num_epochs or 1) for i in range(num_prompts)]
    assert [uid for batch in world.batches for uid in batch] == uids[: sum(sizes)]
    assert tracker.ledgers[-1]["trained"] == sum(sizes)
    assert tracker.ledgers[-1]["in flight"] == 0


@pytest.mark.parametrize(("drop_last", "left"), [(False, 0), (True, 2)])
async def test_groups_that_failed_near_the_end_leave_a_smaller_batch_that_is_accounted_for(
    drop_last: bool, left: int
) -> None:
    world = World()

    def fail(prompt: Prompt, attempt: int) -> Exception | None:
        failing = prompt.uid in ("p:3@0", "p:8@0")
        return GenerationError(f"{prompt.uid}: boom") if failing else None

    config = epochs(1, 10, drop_last=drop_last)
    tracker = await run(config, world, num_prompts=10, generators=FakeGenerators(world, fail=fail))
    assert [len(batch) for batch in world.batches] == [3, 3] + ([] if drop_last else [2])
    ledger = tracker.ledgers[-1]
    assert (ledger["drawn"], ledger["failed"], ledger["buffered"]) == (10, 2, left)
    text = dict(tracker.events)["end of the data"]
    assert text.startswith(f"after step {len(world.batches)} of at most {config.num_steps}")
    assert ("2 groups do not fill a step (data.drop_last)" in text) is drop_last


async def test_a_dataset_smaller_than_a_step_goes_round_in_an_endless_run() -> None:
    world = World()
    await run(make_config(data={"shuffle": False}), world, num_prompts=2)
    assert world.batches[0] == ["p:0@0", "p:1@0", "p:0@1"]
    assert len(world.batches) == 4


async def test_groups_that_all_failed_end_the_run_with_what_was_trained() -> None:
    world = World()

    def fail(prompt: Prompt, attempt: int) -> Exception | None:
        return None if prompt.uid == "p:0@0" else GenerationError(f"{prompt.uid}: boom")

    tracker = await run(
        epochs(1, 5), world, num_prompts=5, generators=FakeGenerators(world, fail=fail)
    )
    assert world.batches == [["p:0@0"]]
    assert tracker.ledgers[-1]["failed"] == 4
