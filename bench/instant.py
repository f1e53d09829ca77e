"""Roles that answer at once: what is left is the driver, or the driver and Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from real_ray.checkpoint import DriverState
from real_ray.roles import GeneratorProgress
from real_ray.types import (
    Prompt,
    RolloutTicket,
    SampledTicket,
    Sampling,
    SyncReport,
    TrainResult,
)


def make_prompts(count: int) -> list[Prompt]:
    """Of 32 tokens each."""
    token_ids = np.arange(32, dtype=np.int32)
    return [
        Prompt(uid=f"bench:{row}", text="Compute 8 + 9.", token_ids=token_ids, answer="17")
        for row in range(count)
    ]


class Generator:
    """Each group has a ticket of its own, and no tokens. In process, or as an async Ray actor."""

    def __init__(self) -> None:
        self._version = -1

    async def generate(self, prompt: Prompt, sampling: Sampling) -> tuple[SampledTicket, str]:
        ticket = SampledTicket(
            uid=prompt.uid,
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=(8,) * sampling.n,
            truncated=(False,) * sampling.n,
            oldest_version=self._version,
            newest_version=self._version,
            seconds=0.0,
            generator="generator-0",
            ref=None,
        )
        return ticket, "group"

    async def load(self, policy_version: int) -> None:
        self._version = policy_version

    async def progress(self) -> GeneratorProgress:
        return GeneratorProgress(num_running=0, num_tokens=0, num_finished=0)


class RewardWorker:
    """In process, or as a Ray actor."""

    def __init__(self, num_generations: int) -> None:
        self._rewards = [1.0] + [0.0] * (num_generations - 1)

    def score(self, group: Any) -> tuple[tuple[list[float], float], str]:
        return (self._rewards, 0.0), "scored group"


class GeneratorPool:
    """`GeneratorPool` in process."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        await asyncio.sleep(0)
        ticket, _ = await self._generator.generate(prompt, sampling)
        return ticket

    async def watch(self) -> None:
        await asyncio.Event().wait()


class RewardPool:
    """`RewardPool` in process."""

    def __init__(self, worker: RewardWorker) -> None:
        self._worker = worker

    async def score(self, group: SampledTicket) -> RolloutTicket:
        await asyncio.sleep(0)
        (rewards, seconds), ref = self._worker.score(group)
        return RolloutTicket(sampled=group, rewards=tuple(rewards), seconds=seconds, ref=ref)


class Learner:
    """`LearnerGroup`."""

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        return TrainResult(policy_version=policy_version, metrics={}, samples=())

    async def save(self, directory: str) -> None:
        raise NotImplementedError

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        raise NotImplementedError


class Broadcaster:
    """`WeightBroadcaster`: tells the generators the version, through Ray if they are actors."""

    def __init__(self, loads: Sequence[Any]) -> None:
        self._loads = loads

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        await asyncio.gather(*(load(policy_version) for load in self._loads))
        return SyncReport(
            policy_version=policy_version,
            seconds=0.0,
            pause_seconds=0.0,
            num_generators=len(self._loads),
            num_tensors=1,
            num_bytes=1,
            probe_difference=0.0,
        )

    async def bring_in(self) -> None:
        await asyncio.Event().wait()
