"""Generators that are lost and replaced, that come and go: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_generators import GROUP_S, PROMPT, SAMPLING, START_S, FakeGenerator, Generators
from fakes import make_prompts
from hypothesis import given
from hypothesis import strategies as st

from real_ray.config.rollout import RolloutConfig
from real_ray.errors import (
    ActorDiedError,
    ConfigError,
    GenerationError,
    GeneratorsLostError,
    ModelError,
    RunError,
)
from real_ray.simulate.virtual_time import run_in_virtual_time
from real_ray.types import Prompt, SampledTicket, Sampling


def pool_of(num_generators: int, **settings: Any) -> Generators:
    return Generators(RolloutConfig(num_generators=num_generators, **settings))


def run(work: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(asyncio.wait_for(work, 50_000))  # polls would go on for ever


def now() -> float:
    return asyncio.get_running_loop().time()


def events(generators: Generators, kind: str) -> list[str]:
    return [text for what, text in generators.tracker.events if what == kind]


def test_groups_go_to_the_generator_with_the_least_to_do() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            assert await generators.generate(3) == ["generator-0", "generator-1", "generator-0"]
            began = now()
            await generators.generate(4)
            assert now() - began == GROUP_S, "all at once"

    run(work())


def test_a_generator_that_dies_is_replaced_and_its_groups_are_tried_elsewhere() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            groups = [
                asyncio.create_task(generators.pool.generate(PROMPT, SAMPLING)) for _ in range(2)
            ]
            await asyncio.sleep(1.5)
            died = now()
            generators.made[0].die()
            assert (await groups[0]).generator == "generator-1"
            (told,) = events(generators, "generation failed")
            assert told == (
                "group p:0: generator-0 was lost: generator-0 has died; it goes to another one"
            )
            assert (await groups[1]).generator == "generator-1"
            assert await generators.generate(2) == ["generator-1"] * 2, "it is not ready yet"
            await asyncio.sleep(died + 1 + START_S - now() + 0.001)
            assert await generators.generate(2) == ["generator-0", "generator-1"]
            assert generators.made[0].stopped == "killed"
        assert [g.name for g in generators.made] == ["generator-0", "generator-1", "generator-0"]
        assert [g.stopped for g in generators.made[1:]] == ["ended", "ended"]
        assert events(generators, "generator lost") == [
            "generator-0: generator-0 has died; starting it again in 1 s (1 of at most 5)"
        ]
        assert events(generators, "generator healed") == ["generator-0, after 21.0 s"]

    run(work())


def test_a_generator_that_dies_with_nothing_to_do_is_found_too() -> None:
    async def work() -> None:
        generators = pool_of(1)
        async with generators.running():
            generators.made[0].die()
            await asyncio.sleep(11 + 1 + START_S)
            assert await generators.generate() == ["generator-0"]
            assert len(generators.made) == 2

    run(work())


@pytest.mark.parametrize("how", ["samples nothing", "answers nothing"])
def test_a_generator_that_hangs_is_replaced_after_stall_s(how: str) -> None:
    async def work() -> None:
        generators = pool_of(2, stall_s=30.0)
        async with generators.running():
            group = asyncio.create_task(generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1.5)
            began = now()
            generators.made[0].hangs = how == "samples nothing"
            generators.made[0].is_deaf = how == "answers nothing"
            if how == "answers nothing":
                generators.made[0].hangs = True
            assert (await group).generator == "generator-1"
            took = now() - began - GROUP_S
            assert 30 <= took <= 30 + 2 * 7.5, "polls are a quarter of stall_s apart"
        (lost,) = events(generators, "generator lost")
        assert "rollout.stall_s" in lost
        assert "rollout.stall_s" in events(generators, "generation failed")[0], (
            "the group hears why"
        )
        assert ("sampled no token for" in lost) == (how == "samples nothing")

    run(work())


def test_an_engine_that_is_slow_or_idle_is_not_taken_for_a_hung_one() -> None:
    async def work() -> None:
        generators = pool_of(1, stall_s=2.0)  # a token takes one second
        async with generators.running():
            for _ in range(5):
                await generators.generate()
            await asyncio.sleep(100)
            assert len(generators.made) == 1

    run(work())


@pytest.mark.parametrize("is_deaf", [False, True])
def test_an_engine_that_is_busy_with_a_weight_sync_is_not_taken_for_a_hung_one(
    is_deaf: bool,
) -> None:
    async def work() -> None:
        generators = pool_of(1, stall_s=8.0)
        async with generators.running():
            group = asyncio.create_task(generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1.5)
            (member,) = generators.pool.members()
            member.settled.clear()
            generators.made[0].hangs, generators.made[0].is_deaf = True, is_deaf
            await asyncio.sleep(100)
            generators.made[0].hangs = generators.made[0].is_deaf = False
            member.settled.set()
            assert (await group).generator == "generator-0"
            assert len(generators.made) == 1

    run(work())


def test_pauses_before_further_starts_double_and_a_finished_group_begins_anew() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            mortal = generators.made[0]
            for _ in range(4):
                mortal.die()
                await asyncio.sleep(11 + 16 + START_S)
                mortal = generators.made[-1]
            pauses = [text.split(" again in ")[1] for text in events(generators, "generator lost")]
            assert [float(text.split()[0]) for text in pauses] == [1, 2, 4, 8]
            await generators.generate(2)
            generators.made[-1].die()
            await asyncio.sleep(11 + 16 + START_S)
            assert events(generators, "generator lost")[-1].endswith("in 1 s (1 of at most 5)")

    run(work())


def test_what_cannot_be_started_is_given_up_and_the_others_go_on() -> None:
    async def work() -> None:
        def prepare(generator: FakeGenerator, number: int) -> None:
            if generator.name == "generator-1":
                generator.start_error = ActorDiedError("generator-1 failed: no memory")

        generators = pool_of(2, max_restarts=2, min_generators=1)
        generators.prepare = prepare
        async with generators.running():
            await asyncio.sleep(10 * START_S)
            assert await generators.generate(2) == ["generator-0"] * 2
            assert len(generators.made) == 1 + 3
            assert (
                "no memory; given up after 2 further starts"
                in events(generators, "generator lost")[-1]
            )
            generators.prepare = lambda generator, number: None
            generators.pool.scale(2)  # somebody has mended it
            await asyncio.sleep(2 * START_S)
            assert sorted(await generators.generate(2)) == ["generator-0", "generator-1"]

    run(work())


def test_bad_input_at_the_first_start_ends_it_at_once() -> None:
    async def work() -> None:
        def prepare(generator: FakeGenerator, number: int) -> None:
            generator.start_error = ModelError("no such model")

        generators = pool_of(3)
        generators.prepare = prepare
        async with generators.running(begun=False) as keeping:
            with pytest.raises(ModelError):
                await generators.pool.watch()
            with pytest.raises(ModelError):
                await keeping
            assert now() == START_S

    run(work())


def test_when_no_generator_starts_the_run_ends_after_one_try_of_each() -> None:
    async def work() -> None:
        def prepare(generator: FakeGenerator, number: int) -> None:
            generator.start_error = RunError("no driver")

        generators = pool_of(3)
        generators.prepare = prepare
        async with generators.running(begun=False):
            with pytest.raises(RunError, match="no driver"):
                await generators.pool.watch()
            assert len(generators.made) == 3

    run(work())


def test_too_few_for_too_long_ends_the_run() -> None:
    async def work() -> None:
        generators = pool_of(2, min_generators=2, recovery_s=10.0)
        async with generators.running():
            began = now()
            generators.made[1].die()
            with pytest.raises(
                GeneratorsLostError, match=r"^1 generators for 10 s .*needs 2 \(rollout.min"
            ):
                await generators.pool.watch()
            assert 10 <= now() - began <= 10 + 10 + 1

    run(work())


def test_too_few_for_a_while_does_not() -> None:
    async def work() -> None:
        generators = pool_of(2, min_generators=2, recovery_s=START_S + 2)
        async with generators.running():
            for _ in range(3):
                generators.made[-1].die()
                await asyncio.sleep(60)
                await generators.generate(2)
            watching = asyncio.create_task(generators.pool.watch())
            await asyncio.sleep(1000)
            assert not watching.done()
            watching.cancel()

    run(work())


def test_when_too_few_can_ever_start_the_run_does_not_wait() -> None:
    async def work() -> None:
        generators = pool_of(1, max_restarts=1, recovery_s=1e6)
        async with generators.running():
            generators.prepare = lambda generator, number: setattr(
                generator, "start_error", RunError("broken")
            )
            generators.made[0].die()
            with pytest.raises(GeneratorsLostError, match=r"2 times in a row.*last time: broken"):
                await generators.pool.watch()

    run(work())


def test_a_run_begins_with_min_generators_and_fills_up_to_max() -> None:
    async def work() -> None:
        def prepare(generator: FakeGenerator, number: int) -> None:
            if generator.name != "generator-0":
                generator.start = lambda: asyncio.sleep(1000)  # type: ignore[method-assign]

        generators = pool_of(2, min_generators=1, max_generators=4)
        generators.prepare = prepare
        async with generators.running():
            assert now() == START_S
            assert generators.pool.counts() == {
                "wanted": 4,
                "starting": 3,
                "waiting for weights": 0,
                "ready": 1,
                "leaving": 0,
                "lost": 0,
            }
            await asyncio.sleep(1000)
            assert sorted(await generators.generate(4)) == [f"generator-{i}" for i in range(4)]

    run(work())


def test_scaling_up_and_down_loses_no_group() -> None:
    async def work() -> None:
        generators = pool_of(1)
        async with generators.running():
            generators.pool.scale(3)
            await asyncio.sleep(START_S + 1)
            groups = [asyncio.create_task(generators.generate(1)) for _ in range(6)]
            await asyncio.sleep(0.5)
            generators.pool.scale(1)
            assert generators.pool.counts()["leaving"] == 2
            assert await generators.generate(2) == ["generator-0"] * 2, "the others take no more"
            made_by = [name for group in groups for name in await group]
            assert sorted(made_by) == [f"generator-{i // 2}" for i in range(6)], "all were finished"
            await asyncio.sleep(0)
            assert [g.stopped for g in generators.made] == ["", "ended", "ended"]
            assert events(generators, "generator left") == ["generator-1", "generator-2"]
            generators.pool.scale(2)
            await asyncio.sleep(START_S + 1)
            assert sorted(await generators.generate(2)) == ["generator-0", "generator-1"]

    run(work())


def test_scaling_down_takes_those_that_do_nothing_yet() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            generators.made[0].die()
            await asyncio.sleep(15)  # generator-0 starts again
            generators.pool.scale(1)
            await asyncio.sleep(100)
            assert await generators.generate() == ["generator-1"]
            assert events(generators, "generator left") == ["generator-0"]

    run(work())


def test_scaling_beyond_the_bounds_is_refused() -> None:
    async def work() -> None:
        generators = pool_of(2, min_generators=2, max_generators=3)
        async with generators.running():
            for number in (1, 4):
                with pytest.raises(ConfigError, match=f"to {number} generators.*allows 2 to 3"):
                    generators.pool.scale(number)

    run(work())


def test_a_generator_with_wrong_weights_gives_its_groups_back_and_gets_no_more() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            group = asyncio.create_task(generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1)
            member = next(m for m in generators.pool.members() if m.num_running)
            generators.pool.interrupt(member)
            assert generators.pool.counts()["waiting for weights"] == 1
            await group
            (told,) = events(generators, "generation failed")
            assert "generator-0 was lost: it has wrong weights" in told
            assert generators.pool.counts()["ready"] == 2, "it has been admitted again"
            assert not generators.made[0].stopped

    run(work())


@given(
    st.lists(
        st.tuples(st.sampled_from(["die", "hang", "scale", "idle"]), st.integers(0, 3)),
        max_size=12,
    )
)
def test_whatever_happens_every_group_is_generated_in_the_end(
    faults: list[tuple[str, int]],
) -> None:
    async def group(generators: Generators) -> None:
        while True:
            try:
                await generators.pool.generate(PROMPT, SAMPLING)
                return
            except GenerationError:
                pass

    async def work() -> None:
        generators = pool_of(2, stall_s=10.0, max_restarts=100)
        async with generators.running():
            groups = [asyncio.create_task(group(generators)) for _ in range(20)]
            for what, number in faults:
                await asyncio.sleep(3)
                living = [g for g in generators.made if not g.stopped]
                victim = living[number % len(living)] if living else None
                if what == "die" and victim:
                    victim.die()
                elif what == "hang" and victim:
                    victim.hangs = victim.is_deaf = True
                elif what == "scale":
                    generators.pool.scale(number + 1)
            await asyncio.wait_for(asyncio.gather(*groups), 10_000)
            await asyncio.sleep(1000)
            counts = generators.pool.counts()
            assert (
                counts["ready"]
                == counts["wanted"]
                == len([g for g in generators.made if not g.stopped])
            )

    run(work())


def test_errors_that_nobody_foresaw_reach_who_watches() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            generators.prepare = lambda generator, number: 1 // 0  # type: ignore[return-value]
            generators.made[0].die()
            with pytest.raises(ZeroDivisionError):
                await generators.pool.watch()
            assert [g.stopped for g in generators.made] == ["killed", "ended"]

    run(work())


def test_a_group_that_generators_die_of_fails_alone() -> None:
    async def work() -> None:
        generators = pool_of(1)
        poisonous = make_prompts(3)[1]

        class Mortal(FakeGenerator):
            async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
                if prompt is poisonous:
                    asyncio.get_running_loop().call_later(0.5, self.die)
                return await super().generate(prompt, sampling)

        generators.generator = Mortal
        async with generators.running():
            groups = [
                asyncio.create_task(generators.pool.generate(prompt, SAMPLING))
                for prompt in make_prompts(3)[::2]
            ]
            for number in range(3):  # as often as a driver tries a group
                with pytest.raises(GenerationError, match=r"^group p:1: generator-0 was lost: "):
                    await generators.pool.generate(poisonous, SAMPLING)
                assert len(generators.made) <= 3 + number
            for group in groups:
                assert (await group).generator == "generator-0"
            assert not any("given up" in t for t in events(generators, "generator lost"))

    run(work())


def test_a_generator_that_leaves_does_not_end_in_the_middle_of_a_sync() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            with generators.pool.syncing(generators.pool.members()):
                generators.pool.scale(1)
                await asyncio.sleep(100)
                assert generators.made[1].stopped == ""
            await asyncio.sleep(0.01)
            assert generators.made[1].stopped == "ended"

    run(work())


def test_a_group_that_finishes_in_a_sync_counts_once_the_weights_are_verified() -> None:
    async def work() -> None:
        generators = pool_of(2)
        async with generators.running():
            group = asyncio.create_task(generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1)
            member = next(m for m in generators.pool.members() if m.num_running)
            with generators.pool.syncing([member]):
                await asyncio.sleep(10)
                assert not group.done()
                generators.pool.interrupt(member)
            began = now()
            await group
            assert now() - began == GROUP_S, "made anew"

    run(work())


def test_bad_input_is_not_tried_again_when_another_one_has_left_before_it_started() -> None:
    async def work() -> None:
        generators = pool_of(2, min_generators=1)
        generators.prepare = lambda generator, number: setattr(
            generator, "start_error", ModelError("no such model")
        )
        async with generators.running(begun=False):
            await asyncio.sleep(1)
            generators.pool.scale(1)
            with pytest.raises(ModelError):
                await generators.pool.watch()

    run(work())
