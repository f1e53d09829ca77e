"""The pool of generators and the broadcaster, with actors that stand for engines and a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from fake_engines import Engine, Rank
from local_ray import local_ray
from ready_generators import Ready, ready

from real_ray.errors import ActorDiedError, GenerationError, LearnerLostError
from real_ray.types import Prompt, Sampling

SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=10)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Any]]:
    """Three, none of which runs anything between two tests."""
    with local_ray({"PYTHONPATH": str(Path(__file__).parents[1])}):  # where the class is
        yield [start(Engine) for _ in range(3)]


@pytest.fixture(scope="module")
def rank(engines: list[Any]) -> Any:
    return start(Rank)


def start(actor: type, *arguments: Any) -> Any:
    return ray.remote(actor).options(num_cpus=0, max_concurrency=1000).remote(*arguments)


def prompt(uid: str, text: str = "") -> Prompt:
    return Prompt(uid=uid, text=text, token_ids=np.ones(1, dtype=np.int32), answer="")


class TestPool:
    async def test_a_cancelled_caller_ends_the_request_and_frees_its_place(
        self, engines: list[Any]
    ) -> None:
        async with ready(engines) as it:
            it.admit_all()
            task = asyncio.create_task(it.pool.generate(prompt("a", "never ends"), SAMPLING))
            await engines[0].until_running.remote("a")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await self.check_that_nothing_runs(it, engines)

    async def test_a_request_that_takes_too_long_is_ended(self, engines: list[Any]) -> None:
        await engines[0].until_running.remote()  # it is up
        async with ready(engines, timeout_s=3.0) as it:
            it.admit_all()
            with pytest.raises(
                GenerationError, match=r"^group a: generator-0 did not .* within 3 s"
            ):
                await it.pool.generate(prompt("a", "never ends"), SAMPLING)
            await self.check_that_nothing_runs(it, engines)

    async def test_a_group_that_fails_costs_nothing_but_itself(self, engines: list[Any]) -> None:
        async with ready(engines[:1]) as it:
            it.admit_all()
            other = asyncio.create_task(it.pool.generate(prompt("b", "never ends"), SAMPLING))
            await engines[0].until_running.remote("b")
            for _ in range(2):
                with pytest.raises(GenerationError, match=r"^group a: no output"):
                    await it.pool.generate(prompt("a", "fails"), SAMPLING)
            ticket = await it.pool.generate(prompt("a"), SAMPLING)
            assert (ticket.uid, await ticket.ref) == ("a", "group of a")
            await engines[0].until_running.remote("b")
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other

    async def test_a_generator_that_is_gone_is_named_and_its_group_is_not_lost(
        self, engines: list[Any]
    ) -> None:
        mortal = start(Engine)
        async with ready([mortal, engines[0]]) as it:
            it.admit_all()
            task = asyncio.create_task(it.pool.generate(prompt("a", "never ends"), SAMPLING))
            await mortal.until_running.remote("a")
            ray.kill(mortal)
            await engines[0].until_running.remote("a")
            (told,) = [text for kind, text in it.tracker.events if kind == "generation failed"]
            assert told.startswith("group a: generator-0 was lost: generator-0 has died")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    @staticmethod
    async def check_that_nothing_runs(it: Ready, engines: list[Any]) -> None:
        """In the engine, and in what the pool knows: the next group goes there again."""
        await asyncio.wait_for(engines[0].until_running.remote(), 60)
        await it.pool.generate(prompt("next"), SAMPLING)
        assert await engines[0].last.remote() == "next"


class TestBroadcaster:
    async def test_one_that_fails_in_a_sync_does_not_keep_the_others(
        self, engines: list[Any], rank: Any
    ) -> None:
        for engine_fails, rank_fails in (("pause", ""), ("", "raises")):
            async with ready(engines, [rank]) as it:
                await engines[1].fail.remote(engine_fails)
                await rank.fail.remote(rank_fails)
                sync = asyncio.create_task(it.broadcaster.broadcast(policy_version=1))
                if rank_fails:
                    await rank.until_failed.remote()
                    await rank.fail.remote("")
                report = await sync
                await engines[1].fail.remote("")
                assert report.num_generators == 2
                assert await self.paused([engines[0], engines[2]]) == [False] * 2
                assert 0 < report.pause_seconds <= report.seconds
                await it.pool.newcomers()  # the same actor, as its own replacement
                report = await it.broadcaster.broadcast(policy_version=2)
                assert report.num_generators == 3

    async def test_a_learner_that_fails_as_nobody_expects_is_lost(
        self, engines: list[Any], rank: Any
    ) -> None:
        async with ready(engines, [rank]) as it:
            await rank.fail.remote("raises what nobody expects")
            with pytest.raises(
                LearnerLostError, match=r"sync of version 1: learner-0 failed: Zero"
            ):
                await it.broadcaster.broadcast(policy_version=1)
            await rank.fail.remote("")
            assert (await it.broadcaster.broadcast(policy_version=1)).num_generators == 3
            assert await self.paused(engines) == [False] * 3

    @staticmethod
    async def paused(engines: list[Any]) -> list[bool]:
        return await asyncio.gather(*(engine.is_paused.remote() for engine in engines))

    async def test_a_rank_that_dies_before_the_group_is_formed_is_a_lost_learner(
        self, engines: list[Any], rank: Any
    ) -> None:
        async with ready(engines, [rank]) as it:

            async def nobody_answers(_: int) -> Any:
                raise ActorDiedError("learner-0 has died")

            it.learner._rendezvous = nobody_answers
            with pytest.raises(LearnerLostError, match=r"sync of version 1: learner-0 has died"):
                await it.broadcaster.broadcast(policy_version=1)
