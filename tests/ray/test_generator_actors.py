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

from actors.broadcaster import RayBroadcaster
from actors.pools import RayGeneratorPool, RayLearnerGroup
from real_ray.config import LearnerConfig, LossConfig
from real_ray.errors import ActorDiedError, GenerationError, SyncError
from real_ray.types import Prompt, Sampling

SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=10)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Any]]:
    """Three, none of which runs anything between two tests."""
    with local_ray({"PYTHONPATH": str(Path(__file__).parents[1])}):  # where the class is
        yield [start(Engine) for _ in range(3)]


@pytest.fixture(scope="module")
def rank(engines: list[Any]) -> Any:
    return start(Rank, engines)


def start(actor: type, *arguments: Any) -> Any:
    return ray.remote(actor).options(num_cpus=0, max_concurrency=1000).remote(*arguments)


def prompt(uid: str, text: str = "") -> Prompt:
    return Prompt(uid=uid, text=text, token_ids=np.ones(1, dtype=np.int32), answer="")


class TestPool:
    async def test_a_cancelled_caller_ends_the_request_and_frees_its_place(
        self, engines: list[Any]
    ) -> None:
        pool = RayGeneratorPool(engines, timeout_s=60.0)
        task = asyncio.create_task(pool.generate(prompt("a", "never ends"), SAMPLING))
        await engines[0].until_running.remote("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await self.check_that_nothing_runs(pool, engines)

    async def test_a_request_that_takes_too_long_is_ended(self, engines: list[Any]) -> None:
        await engines[0].until_running.remote()  # it is up
        pool = RayGeneratorPool(engines, timeout_s=3.0)
        with pytest.raises(GenerationError, match=r"^group a: generator-0 did not .* within 3 s"):
            await pool.generate(prompt("a", "never ends"), SAMPLING)
        await self.check_that_nothing_runs(pool, engines)

    async def test_a_group_that_fails_costs_nothing_but_itself(self, engines: list[Any]) -> None:
        pool = RayGeneratorPool(engines[:1], timeout_s=60.0)
        other = asyncio.create_task(pool.generate(prompt("b", "never ends"), SAMPLING))
        await engines[0].until_running.remote("b")
        for _ in range(2):
            with pytest.raises(GenerationError, match=r"^group a: no output"):
                await pool.generate(prompt("a", "fails"), SAMPLING)
        ticket = await pool.generate(prompt("a"), SAMPLING)
        assert (ticket.uid, await ticket.ref) == ("a", "group of a")
        await engines[0].until_running.remote("b")
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other

    async def test_a_generator_that_is_gone_is_named(self, engines: list[Any]) -> None:
        mortal = start(Engine)
        pool = RayGeneratorPool([mortal], timeout_s=60.0)
        task = asyncio.create_task(pool.generate(prompt("a", "never ends"), SAMPLING))
        await mortal.until_running.remote("a")
        ray.kill(mortal)
        with pytest.raises(ActorDiedError, match=r"^generator-0 has died"):
            await task

    @staticmethod
    async def check_that_nothing_runs(pool: RayGeneratorPool, engines: list[Any]) -> None:
        """In the engine, and in what the pool knows: the next group goes there again."""
        await asyncio.wait_for(engines[0].until_running.remote(), 60)
        await pool.generate(prompt("next"), SAMPLING)
        assert await engines[0].last.remote() == "next"


class TestBroadcaster:
    @staticmethod
    def broadcaster(engines: list[Any], rank: Any) -> RayBroadcaster:
        learner = RayLearnerGroup([rank], config=LearnerConfig(timeout_s=60), loss=LossConfig())
        return RayBroadcaster(engines, learner, timeout_s=60.0, probe=None, probe_tolerance=0.1)

    @pytest.mark.parametrize(
        ("engine_fails", "rank_fails", "error"),
        [
            ("pause", "", SyncError),
            ("", "raises", SyncError),
            ("", "raises what nobody expects", ActorDiedError),
        ],
    )
    async def test_an_error_during_a_sync_leaves_no_generator_paused(
        self,
        engines: list[Any],
        rank: Any,
        engine_fails: str,
        rank_fails: str,
        error: type[Exception],
    ) -> None:
        broadcaster = self.broadcaster(engines, rank)
        await engines[1].fail.remote(engine_fails)
        await rank.fail.remote(rank_fails)
        with pytest.raises(error):
            await broadcaster.broadcast(policy_version=1)
        assert await self.paused(engines) == [False] * 3
        await engines[1].fail.remote("")
        await rank.fail.remote("")
        report = await broadcaster.broadcast(policy_version=2)  # all goes on from there
        assert report.policy_version == 2
        assert 0 < report.pause_seconds <= report.seconds

    async def test_a_cancelled_sync_leaves_no_generator_paused(
        self, engines: list[Any], rank: Any
    ) -> None:
        await rank.fail.remote("hangs")
        task = asyncio.create_task(self.broadcaster(engines, rank).broadcast(policy_version=1))
        await rank.until_hanging.remote()
        assert await self.paused(engines) == [True] * 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await self.paused(engines) == [False] * 3

    @staticmethod
    async def paused(engines: list[Any]) -> list[bool]:
        return await asyncio.gather(*(engine.is_paused.remote() for engine in engines))
