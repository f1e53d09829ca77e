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


@pytest.fixture(scope="module", autouse=True)
def a_ray() -> Iterator[None]:
    with local_ray({"PYTHONPATH": str(Path(__file__).parents[1])}):  # where the actors' classes are
        yield


def engines(*fails: str) -> list[Any]:
    actor = ray.remote(Engine).options(num_cpus=0, max_concurrency=1000)
    return [actor.remote(fails=what) for what in fails]


def prompt(uid: str, text: str = "") -> Prompt:
    return Prompt(uid=uid, text=text, token_ids=np.ones(1, dtype=np.int32), answer="")


class TestPool:
    async def test_a_cancelled_caller_ends_the_request_and_frees_its_place(self) -> None:
        held = engines("", "")
        pool = RayGeneratorPool(held, timeout_s=60.0)
        task = asyncio.create_task(pool.generate(prompt("a", "never ends"), SAMPLING))
        await held[0].until_running.remote("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(held[0].until_running.remote(), 60)
        await self.check_that_no_place_is_taken(pool, held)

    async def test_a_request_that_takes_too_long_is_ended(self) -> None:
        held = engines("", "")
        await held[0].until_running.remote()  # it is up
        pool = RayGeneratorPool(held, timeout_s=0.5)
        with pytest.raises(GenerationError, match=r"^group a: generator-0 did not .* within 0.5 s"):
            await pool.generate(prompt("a", "never ends"), SAMPLING)
        await asyncio.wait_for(held[0].until_running.remote(), 60)
        await self.check_that_no_place_is_taken(pool, held)

    async def test_a_group_that_fails_costs_nothing_but_itself(self) -> None:
        held = engines("", "")
        pool = RayGeneratorPool(held, timeout_s=60.0)
        other = asyncio.create_task(pool.generate(prompt("b", "never ends"), SAMPLING))
        await held[0].until_running.remote("b")
        for _ in range(2):
            with pytest.raises(GenerationError, match=r"^group a: no output"):
                await pool.generate(prompt("a", "fails"), SAMPLING)
        ticket = await pool.generate(prompt("a"), SAMPLING)
        assert (ticket.uid, await ticket.ref) == ("a", "group of a")
        assert not other.done()
        other.cancel()

    async def test_a_generator_that_is_gone_is_named(self) -> None:
        held = engines("")
        pool = RayGeneratorPool(held, timeout_s=60.0)
        task = asyncio.create_task(pool.generate(prompt("a", "never ends"), SAMPLING))
        await held[0].until_running.remote("a")
        ray.kill(held[0])
        with pytest.raises(ActorDiedError, match=r"^generator-0 has died"):
            await task

    @staticmethod
    async def check_that_no_place_is_taken(pool: RayGeneratorPool, held: list[Any]) -> None:
        """The next group goes to the first generator: as many as before run on it, none."""
        task = asyncio.create_task(pool.generate(prompt("next", "never ends"), SAMPLING))
        await asyncio.wait_for(held[0].until_running.remote("next"), 60)
        task.cancel()


class TestBroadcaster:
    @staticmethod
    def broadcaster(held: list[Any], rank: Any) -> RayBroadcaster:
        learner = RayLearnerGroup([rank], config=LearnerConfig(timeout_s=60), loss=LossConfig())
        return RayBroadcaster(held, learner, timeout_s=60.0, probe=None, probe_tolerance=0.1)

    @pytest.mark.parametrize(
        ("engine", "rank", "error"),
        [
            ("pause", "", SyncError),
            ("", "raises", SyncError),
            ("", "raises what nobody expects", ActorDiedError),
        ],
    )
    async def test_an_error_during_a_sync_leaves_no_generator_paused(
        self, engine: str, rank: str, error: type[Exception]
    ) -> None:
        held = engines("", engine, "")
        failing = ray.remote(Rank).options(num_cpus=0).remote(held, fails=rank)
        with pytest.raises(error):
            await self.broadcaster(held, failing).broadcast(policy_version=1)
        assert await asyncio.gather(*(e.is_paused.remote() for e in held)) == [False] * 3
        if not engine:  # and the next sync goes on from there
            working = ray.remote(Rank).options(num_cpus=0).remote(held)
            report = await self.broadcaster(held, working).broadcast(policy_version=2)
            assert report.policy_version == 2
            assert 0 < report.pause_seconds <= report.seconds

    async def test_a_cancelled_sync_leaves_no_generator_paused(self) -> None:
        held = engines("", "")
        rank = ray.remote(Rank).options(num_cpus=0).remote(held, fails="hangs")
        task = asyncio.create_task(self.broadcaster(held, rank).broadcast(policy_version=1))
        await rank.until_sending.remote()
        assert await asyncio.gather(*(e.is_paused.remote() for e in held)) == [True] * 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.gather(*(e.is_paused.remote() for e in held)) == [False] * 2
