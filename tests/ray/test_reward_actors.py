"""Reward workers as real Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from local_ray import local_ray

from actors.reward import RewardActor
from actors.reward_pool import RayRewardPool
from real_ray.activity import Activity
from real_ray.errors import RewardError
from real_ray.tracking import Tracker
from real_ray.types import (
    Completion,
    Prompt,
    RolloutGroup,
    SampledGroup,
    SampledTicket,
    VersionSpan,
)

FUNCTIONS = """
import os, threading
from pathlib import Path

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def raises(completions, **kwargs):
    raise ZeroDivisionError("no answer")

def nan(completions, **kwargs):
    return [1.0, float("nan")]

def none(completions, **kwargs):
    return [None, 1.0]

def too_few(completions, **kwargs):
    return [1.0]

def hangs_on_marked(completions, **kwargs):
    if completions[0] == "hang":
        threading.Event().wait()
    return [1.0] * len(completions)

def reports_and_hangs(completions, **kwargs):
    if completions[0] == "hang":
        Path(completions[1]).write_text("here")
        threading.Event().wait()
    return [1.0] * len(completions)

def dies(completions, **kwargs):
    os._exit(3)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Ray whose workers can import a user's module of reward functions."""
    directory = tmp_path_factory.mktemp("reward_functions")
    (directory / "user_rewards.py").write_text(FUNCTIONS)
    with local_ray({"PYTHONPATH": str(directory)}):
        yield directory


def make_pool(function: str, *, num_workers: int = 1, timeout_s: float = 60.0) -> RayRewardPool:
    return RayRewardPool(
        lambda index: ray.remote(RewardActor).options(num_cpus=0.1).remote(function),
        num_workers=num_workers,
        function=function,
        timeout_s=timeout_s,
        activity=Activity(),
        tracker=Tracker(),
    )


@pytest.fixture
async def score(functions: Path) -> AsyncIterator[object]:
    pools: list[RayRewardPool] = []

    def make(function: str, **options: object) -> RayRewardPool:
        pools.append(make_pool(function, **options))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop()


def ticket(uid: str, *texts: str) -> SampledTicket:
    one = np.ones(1, dtype=np.int32)
    group = SampledGroup(
        prompt=Prompt(uid=uid, text="", token_ids=one, answer="17"),
        num_generations=len(texts),
        completions=tuple(
            Completion(
                index=index,
                token_ids=one,
                generator_logprobs=np.zeros(1, dtype=np.float32),
                spans=(VersionSpan(version=0, start=0, end=1),),
                text=text,
                finish_reason="stop",
            )
            for index, text in enumerate(texts)
        ),
    )
    return SampledTicket(
        uid=uid,
        prompt_tokens=1,
        completion_tokens=(1,) * len(texts),
        truncated=(False,) * len(texts),
        oldest_version=0,
        newest_version=0,
        seconds=0.0,
        generator="fake",
        ref=ray.put(group),
    )


async def test_a_group_is_scored_and_stays_with_ray(score) -> None:  # type: ignore[no-untyped-def]
    pool = score("last_number")
    result = await pool.score(ticket("p:1@0", "It is 17", "8 + 9 = 18"))
    assert result.rewards == (1.0, 0.0)
    group: RolloutGroup = await result.ref
    assert group.uid == "p:1@0"
    assert group.rewards.tolist() == [1.0, 0.0]


async def test_many_groups_over_few_workers_each_get_their_own_rewards(score) -> None:  # type: ignore[no-untyped-def]
    pool = score("user_rewards:length", num_workers=2)
    groups = [ticket(f"p:{i}@0", "x" * i, "x" * (i + 1)) for i in range(20)]
    results = await asyncio.gather(*(pool.score(group) for group in groups))
    assert [r.rewards for r in results] == [(float(i), float(i + 1)) for i in range(20)]
    assert [r.uid for r in results] == [group.uid for group in groups]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("user_rewards:raises", r"user_rewards:raises.*p:7@0.*ZeroDivisionError: no answer"),
        ("user_rewards:nan", r"user_rewards:nan.*p:7@0, member 1"),
        ("user_rewards:none", r"user_rewards:none.*p:7@0, member 0"),
        ("user_rewards:too_few", r"user_rewards:too_few.*p:7@0.*1 rewards for 2"),
    ],
)
async def test_a_bad_reward_is_an_error_that_names_function_uid_and_sample(  # type: ignore[no-untyped-def]
    score, function: str, words: str
) -> None:
    pool = score(function)
    for _ in range(2):  # the worker is free again
        with pytest.raises(RewardError, match=words):
            await pool.score(ticket("p:7@0", "a", "b"))


async def test_a_hung_reward_is_killed_and_its_worker_replaced(score) -> None:  # type: ignore[no-untyped-def]
    pool = score("user_rewards:hangs_on_marked", timeout_s=30.0)
    await pool.score(ticket("p:0@0", "warm", "up"))
    hung = pool.workers[0]
    pool.timeout_s = 1.0
    with pytest.raises(RewardError, match=r"hangs_on_marked.*p:1@0.*within 1 s.*reward.timeout_s"):
        await pool.score(ticket("p:1@0", "hang", "hang"))
    pool.timeout_s = 30.0
    assert (await pool.score(ticket("p:2@0", "a", "b"))).rewards == (1.0, 1.0)
    assert pool.workers[0] is not hung
    with pytest.raises(ray.exceptions.RayActorError):
        await hung.score.remote(ticket("p:3@0", "a", "b").ref)


async def test_a_reward_that_kills_its_worker_costs_only_its_group(score) -> None:  # type: ignore[no-untyped-def]
    pool = score("user_rewards:dies")
    for _ in range(2):
        with pytest.raises(RewardError, match=r"user_rewards:dies.*p:9@0.*process died"):
            await pool.score(ticket("p:9@0", "a", "b"))


async def test_a_cancelled_caller_leaves_no_worker_that_still_computes(  # type: ignore[no-untyped-def]
    score, tmp_path: Path
) -> None:
    pool = score("user_rewards:reports_and_hangs")
    started = tmp_path / "started"
    os.mkfifo(started)
    hung = pool.workers[0]
    computing = asyncio.create_task(pool.score(ticket("p:1@0", "hang", str(started))))
    await asyncio.to_thread(started.read_text)
    waiting = asyncio.create_task(pool.score(ticket("p:2@0", "a", "b")))
    await asyncio.sleep(0)
    for task in (waiting, computing):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await pool.score(ticket("p:3@0", "a", "b"))).rewards == (1.0, 1.0)
    with pytest.raises(ray.exceptions.RayActorError):
        await hung.score.remote(ticket("p:4@0", "a", "b").ref)


async def test_a_worker_that_is_stopped_or_gone_costs_a_try_and_the_next_one_goes_elsewhere(  # type: ignore[no-untyped-def]
    score,
) -> None:
    pool = score("user_rewards:length", num_workers=2)
    await asyncio.gather(*(pool.score(ticket(f"p:{i}@0", "a")) for i in range(2)))

    def process_id(_: Any) -> int:
        return os.getpid()

    where, gone = ray.get([worker.__ray_call__.remote(process_id) for worker in pool.workers])
    pool.timeout_s = 3.0
    os.kill(where, signal.SIGSTOP)
    os.kill(gone, signal.SIGKILL)
    errors = []
    for uid in ("p:3@0", "p:4@0"):
        with pytest.raises(RewardError) as caught:
            await pool.score(ticket(uid, "a"))
        errors.append(str(caught.value))
    assert "within 3 s" in errors[0]
    assert "process died" in errors[1]
    pool.timeout_s = 60.0
    assert (await pool.score(ticket("p:5@0", "abc"))).rewards == (3.0,)
    assert (await pool.score(ticket("p:6@0", "ab"))).rewards == (2.0,)
    assert not psutil.pid_exists(where), "a stopped process does not stay behind"


async def test_no_worker_is_started_for_nobody(score) -> None:  # type: ignore[no-untyped-def]
    pool = score("user_rewards:dies")
    with pytest.raises(RewardError):
        await pool.score(ticket("p:9@0", "a", "b"))
    assert pool.workers == [None]
