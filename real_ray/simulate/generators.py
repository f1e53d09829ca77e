"""Generators that take time and nothing else."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from random import Random

from real_ray.config import Config
from real_ray.errors import GenerationError, SyncError
from real_ray.simulate.distributions import chances
from real_ray.simulate.level import Level
from real_ray.simulate.timings import Timings
from real_ray.types import Prompt, SampledTicket, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorUse:
    """What the generators did, as shares of the time, mean over generators."""

    idle: float  # nothing to sample
    paused: float  # groups stood still for new weights
    slots: float  # completions that ran, of those that could have


class SimulatedGenerators:
    """`GeneratorPool`: each group goes to the generator with the fewest unfinished completions.

    A generator runs up to `Timings.groups_per_generator` groups at once, however many they are
    each in its own time; further ones wait in their order.
    """

    def __init__(self, config: Config, timings: Timings, *, seed: int) -> None:
        random = Random(seed)
        # Of evaluations and of training apart, so that one does not take the times of the other.
        self._seconds = {greedy: timings.generate.draws(random) for greedy in (False, True)}
        self._fails = chances(timings.failures, random)
        self._timeout_s = config.rollout.timeout_s
        self._drain_timeout_s = config.sync.timeout_s
        num_generators = config.rollout.num_generators
        room = timings.groups_per_generator * config.rollout.num_generations
        self._capacity = room * num_generators
        self._unfinished = [0] * num_generators  # completions, waiting ones included
        self._engines = [_Engine(index, room) for index in range(num_generators)]
        self._version = -1
        self._paused = False
        self._pauses = 0.0  # seconds, of all pauses so far
        self._drained = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._busy_generators = Level()
        self._running_completions = Level()
        self._standing_still = 0.0  # generator seconds

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        index = self._unfinished.index(min(self._unfinished))
        self._unfinished[index] += sampling.n
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._sample(self._engines[index], prompt, sampling)
        except TimeoutError:
            raise GenerationError(
                f"group {prompt.uid}: generator-{index} did not finish it within "
                f"{self._timeout_s:g} s (rollout.timeout_s)"
            ) from None
        finally:
            self._unfinished[index] -= sampling.n

    async def watch(self) -> None:
        await asyncio.Event().wait()  # none is ever lost

    async def pause(self, seconds: float, *, in_flight: bool) -> None:
        """Stand still; running groups go on afterwards, or finish before it begins."""
        self._paused = True
        if in_flight:
            self._standing_still += self._busy_generators.value * seconds
            self._pauses += seconds
        elif self._running_completions.value:
            self._drained.clear()
            try:
                async with asyncio.timeout(self._drain_timeout_s):
                    await self._drained.wait()
            except TimeoutError:
                raise SyncError(
                    f"running completions did not finish within {self._drain_timeout_s:g} s "
                    "(sync.timeout_s). Raise it, or set rollout.in_flight_updates: true"
                ) from None
        await asyncio.sleep(seconds)

    def resume(self, *, policy_version: int) -> None:
        """Go on with new weights."""
        self._version = policy_version
        self._paused = False
        for engine in self._engines:
            self._fill(engine)

    def use(self) -> GeneratorUse:
        """Since the beginning."""
        seconds = self._clock() - self._began or 1.0
        return GeneratorUse(
            idle=1 - self._busy_generators.mean() / len(self._engines),
            paused=self._standing_still / (seconds * len(self._engines)),
            slots=self._running_completions.mean() / self._capacity,
        )

    async def _sample(self, engine: _Engine, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        asked = self._clock()
        seconds = next(self._seconds[sampling.temperature == 0])
        fails = next(self._fails)
        await self._enter(engine, sampling.n)
        try:
            oldest_version = self._version
            await self._run(seconds)
        finally:
            self._leave(engine, sampling.n)
        if fails:
            raise GenerationError(f"group {prompt.uid} on {engine.name}: simulated failure")
        return SampledTicket(
            uid=prompt.uid,
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=(1,) * sampling.n,
            truncated=(False,) * sampling.n,
            oldest_version=oldest_version,
            newest_version=self._version,
            seconds=self._clock() - asked,
            generator=engine.name,
            ref=None,
        )

    async def _run(self, seconds: float) -> None:
        known = self._pauses
        await asyncio.sleep(seconds)
        while self._pauses > known:  # began in the meantime: what was left of it is still left
            seconds, known = self._pauses - known, self._pauses
            await asyncio.sleep(seconds)

    async def _enter(self, engine: _Engine, size: int) -> None:
        if not (self._paused or engine.waiting or size > engine.room):
            self._start(engine, size)
            return
        turn = asyncio.get_running_loop().create_future()
        engine.waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the meantime
                self._leave(engine, size)
            raise

    def _start(self, engine: _Engine, size: int) -> None:
        self._busy_generators.change(engine.running == 0)
        self._running_completions.change(size)
        engine.running += size
        engine.room -= size

    def _leave(self, engine: _Engine, size: int) -> None:
        engine.running -= size
        engine.room += size
        self._busy_generators.change(-(engine.running == 0))
        self._running_completions.change(-size)
        if not self._running_completions.value:
            self._drained.set()
        self._fill(engine)

    def _fill(self, engine: _Engine) -> None:
        """Start waiting groups, in their order, while there is room."""
        while engine.waiting and not self._paused:
            size, turn = engine.waiting[0]
            if not turn.cancelled():
                if size > engine.room:
                    return
                self._start(engine, size)
                turn.set_result(None)
            engine.waiting.popleft()


class _Engine:
    def __init__(self, index: int, room: int) -> None:
        self.name = f"generator-{index}"
        self.room = room  # completions that could be started now
        self.running = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
