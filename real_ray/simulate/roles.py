"""Reward workers, learner and broadcaster that take time and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

from real_ray.checkpoint import DriverState
from real_ray.config import Config
from real_ray.errors import LearnerError, RewardError, SyncError
from real_ray.simulate.distributions import chances
from real_ray.simulate.generators import SimulatedGenerators
from real_ray.simulate.level import Level
from real_ray.simulate.timings import Timings
from real_ray.types import RolloutTicket, SampledTicket, SyncReport, TrainResult


class SimulatedRewards:
    """`RewardPool` of `reward.num_workers` workers."""

    def __init__(self, config: Config, timings: Timings, *, seed: int) -> None:
        random = Random(seed)
        self._seconds = timings.score.draws(random)
        self._one_sided = chances(timings.one_sided, random)
        self._num_workers = config.reward.num_workers
        self._idle = asyncio.Semaphore(self._num_workers)
        self._busy = Level()
        self._timeout_s = config.reward.timeout_s
        self._right, self._wrong = config.loss.positive_above + 1, config.loss.positive_above

    async def score(self, group: SampledTicket) -> RolloutTicket:
        seconds, one_sided = next(self._seconds), next(self._one_sided)
        async with self._idle:
            self._busy.change(1)
            try:
                await asyncio.sleep(min(seconds, self._timeout_s))
            finally:
                self._busy.change(-1)
        if seconds > self._timeout_s:
            raise RewardError(
                f"group {group.uid}: not scored within {self._timeout_s:g} s (reward.timeout_s)"
            )
        wrong = () if one_sided else (self._wrong,)
        rewards = (self._right,) * (group.num_members - len(wrong)) + wrong
        return RolloutTicket(sampled=group, rewards=rewards, seconds=seconds, ref=None)

    def busy(self) -> float:
        """Share of the time since the beginning in which a worker scores, mean over workers."""
        return self._busy.mean() / self._num_workers


class SimulatedLearner:
    """`LearnerGroup` that counts how stale its groups are. Checkpoints take no time."""

    def __init__(self, config: Config, timings: Timings, *, seed: int) -> None:
        self._seconds = timings.train.draws(Random(seed))
        self._timeout_s = config.learner.timeout_s
        self.staleness: Counter[int] = Counter()

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        seconds = next(self._seconds)
        await asyncio.sleep(min(seconds, self._timeout_s))
        if seconds > self._timeout_s:
            raise LearnerError(
                f"the learner did not finish its step within {self._timeout_s:g} s "
                "(learner.timeout_s)"
            )
        trained_version = policy_version - 1
        self.staleness.update(trained_version - g.sampled.oldest_version for g in groups)
        return TrainResult(policy_version=policy_version, metrics={}, samples=())

    async def save(self, directory: str) -> None:
        """Nothing is written."""

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        """Nothing is written."""


class SimulatedBroadcaster:
    """`WeightBroadcaster`: a pause of the generators, and what comes after it."""

    def __init__(
        self, config: Config, timings: Timings, *, generators: SimulatedGenerators, seed: int
    ) -> None:
        # Each from the same numbers: a pause that is all of its sync is as long as it, each time.
        self._seconds = timings.sync.draws(Random(seed))
        self._pauses = timings.pause.draws(Random(seed))
        self._timeout_s = config.sync.timeout_s
        self._generators = generators
        self._in_flight = config.rollout.in_flight_updates
        self._num_generators = config.rollout.num_generators

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        clock = asyncio.get_running_loop().time
        began = clock()
        seconds = next(self._seconds)
        pause = min(next(self._pauses), seconds)  # drawn numbers may be the wrong way round
        if seconds > self._timeout_s:
            await asyncio.sleep(self._timeout_s)
            raise SyncError(
                f"weight sync of version {policy_version}: a generator did not answer within "
                f"{self._timeout_s:g} s (sync.timeout_s). Raise it"
            )
        await self._generators.pause(pause, in_flight=self._in_flight)
        self._generators.resume(policy_version=policy_version)
        await asyncio.sleep(seconds - pause)
        return SyncReport(
            policy_version=policy_version,
            seconds=clock() - began,
            pause_seconds=pause,
            num_generators=self._num_generators,
            num_tensors=1,
            num_bytes=1,
            probe_difference=0.0,
        )

    async def bring_in(self) -> None:
        await asyncio.Event().wait()  # no generator comes later
