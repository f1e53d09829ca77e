"""Simulated generators alone: order and pauses."""

from __future__ import annotations

import asyncio

from fakes import make_config, make_prompts

from real_ray.simulate import Timings, constant, run_in_virtual_time
from real_ray.simulate.generators import SimulatedGenerators
from real_ray.types import Sampling

GROUP = Sampling(n=2, temperature=1.0, max_tokens=4)
EVALUATION = Sampling(n=1, temperature=0.0, max_tokens=4)
(PROMPT,) = make_prompts(1)


async def make_generators() -> SimulatedGenerators:
    """One generator with room for two groups of two, each of 4 s; version 0 is loaded."""
    timings = Timings(
        generate=constant(4),
        score=constant(0),
        train=constant(0),
        sync=constant(0),
        pause=constant(0),
        groups_per_generator=2,
    )
    generators = SimulatedGenerators(make_config(), timings, seed=0)
    generators.resume(policy_version=0)
    return generators


def test_a_group_that_comes_in_a_pause_begins_after_it_with_the_new_weights() -> None:
    async def work() -> None:
        clock = asyncio.get_running_loop().time
        generators = await make_generators()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(generators.generate(PROMPT, GROUP))
            await asyncio.sleep(1)
            pause = tasks.create_task(generators.pause(10, in_flight=True))
            await asyncio.sleep(5)
            late = tasks.create_task(generators.generate(PROMPT, GROUP))
            await pause
            generators.resume(policy_version=1)
            ticket = await running
            assert clock() == 14
            assert (ticket.oldest_version, ticket.newest_version) == (0, 1)
            ticket = await late
            assert clock() == 15
            assert (ticket.oldest_version, ticket.newest_version) == (1, 1)
            assert ticket.seconds == 9

    run_in_virtual_time(work())


def test_nobody_overtakes_a_group_that_waits_for_room() -> None:
    async def work() -> None:
        generators = await make_generators()
        ends: list[tuple[str, float]] = []

        async def one(name: str, sampling: Sampling) -> None:
            await generators.generate(PROMPT, sampling)
            ends.append((name, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one("evaluation 0", EVALUATION))
            tasks.create_task(one("group 0", GROUP))
            tasks.create_task(one("group 1", GROUP))  # room for one completion is left
            tasks.create_task(one("evaluation 1", EVALUATION))
        assert ends == [
            *(("evaluation 0", 4.0), ("group 0", 4.0)),
            *(("group 1", 8.0), ("evaluation 1", 8.0)),
        ]

    run_in_virtual_time(work())


def test_a_pause_that_begins_in_the_time_that_another_cost_delays_again() -> None:
    async def work() -> None:
        generators = await make_generators()
        group = asyncio.create_task(generators.generate(PROMPT, GROUP))
        await asyncio.sleep(3)
        await generators.pause(10, in_flight=True)
        generators.resume(policy_version=1)  # at 13, with 1 of its 4 s left
        await asyncio.sleep(0.5)
        await generators.pause(10, in_flight=True)
        generators.resume(policy_version=2)
        await group
        assert asyncio.get_running_loop().time() == 4 + 2 * 10

    run_in_virtual_time(work())


def test_a_group_that_is_given_up_as_its_turn_comes_leaves_its_place() -> None:
    async def work() -> None:
        generators = await make_generators()
        async with asyncio.TaskGroup() as tasks:
            pause = tasks.create_task(generators.pause(1, in_flight=True))
            await asyncio.sleep(0)
            given_up = tasks.create_task(generators.generate(PROMPT, GROUP))
            await pause
            generators.resume(policy_version=1)  # its turn, which it does not know yet
            given_up.cancel()
            for _ in range(2):
                tasks.create_task(generators.generate(PROMPT, GROUP))
        assert asyncio.get_running_loop().time() == 1 + 4, "both at once, in all of the room"

    run_in_virtual_time(work())


def test_a_group_that_is_given_up_before_its_turn_leaves_no_place() -> None:
    async def work() -> None:
        generators = await make_generators()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                last = tasks.create_task(generators.generate(PROMPT, GROUP))
            await asyncio.sleep(1)
            last.cancel()
            await asyncio.sleep(1)
            await generators.generate(PROMPT, GROUP)
        assert asyncio.get_running_loop().time() == 4 + 4, "after the first two"

    run_in_virtual_time(work())
