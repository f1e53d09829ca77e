"""Generators for `HealingPool` and `Broadcaster` that work, hang and die where they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fakes import RecordingTracker, make_prompts, sampled_ticket

from real_ray.activity import Activity
from real_ray.config.rollout import RolloutConfig
from real_ray.errors import ActorDiedError, RealRayError, SyncError
from real_ray.healing_pool import HealingPool
from real_ray.roles import Generator, GeneratorProgress
from real_ray.types import Prompt, SampledTicket, Sampling
from real_ray.weights import HeldWeights, SentWeights

SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=10)
PROMPT = make_prompts(1)[0]
START_S = 20.0
GROUP_S = 4.0  # a token a second


@dataclass
class FakeGenerator:
    """Takes `START_S` to start and `GROUP_S` for a group."""

    name: str
    start_error: RealRayError | None = None
    hangs: bool = False  # samples nothing more
    is_deaf: bool = False  # answers nothing more
    stopped: str = ""
    is_paused: bool = False
    num_running: int = 0
    num_finished: int = 0
    tokens: int = 0
    held: HeldWeights | None = None
    weights: float = 0.0  # of the model: log-probs of whatever
    fails_at: set[str] = field(default_factory=set)
    spoils: Callable[[HeldWeights], HeldWeights] = lambda held: held
    loads: Callable[[float], float] = lambda weights: weights
    _died: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self) -> None:
        self._died.set()

    async def start(self) -> None:
        await asyncio.sleep(START_S)
        if self.start_error is not None:
            raise self.start_error

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        self.num_running += 1
        oldest = self._version
        try:
            for _ in range(int(GROUP_S)):
                await self._unless_dead(self._token())
            self.num_finished += 1
            ticket = sampled_ticket(
                prompt.uid, members=sampling.n, oldest=oldest, newest=self._version
            )
            return replace(ticket, generator=self.name)
        finally:
            self.num_running -= 1

    @property
    def _version(self) -> int:
        return self.held.policy_version if self.held else 0

    async def _token(self) -> None:
        await asyncio.sleep(1)
        while self.hangs or self.is_paused:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(1)
        self.tokens += 1

    async def progress(self) -> GeneratorProgress:
        await self._answer("progress")
        return GeneratorProgress(
            num_running=self.num_running, num_tokens=self.tokens, num_finished=self.num_finished
        )

    async def pause(self) -> None:
        await self._answer("pause")
        self.is_paused = True

    async def resume(self) -> None:
        await self._answer("resume")
        self.is_paused = False

    async def held_weights(self) -> HeldWeights:
        await self._answer("held_weights")
        assert self.held is not None
        return self.spoils(self.held)

    async def logprobs(self, token_ids: Any) -> Any:
        await self._answer("logprobs")
        return np.full(len(token_ids) - 1, self.weights, dtype=np.float32)

    async def stop(self, *, at_once: bool) -> None:
        self.stopped = "killed" if at_once else "ended"
        self.die()

    async def _answer(self, what: str) -> None:
        if what in self.fails_at:
            raise SyncError(f"{self.name} cannot {what}", (self.name,))
        await self._unless_dead(asyncio.sleep(1e9 if self.is_deaf else 0))

    async def _unless_dead(self, work: Awaitable[None]) -> None:
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self._died.is_set():
                raise ActorDiedError(f"{self.name} has died")
        finally:
            working.cancel()
            dying.cancel()


@dataclass
class Generators:
    """A pool of fake generators, and all that were ever made for it."""

    config: RolloutConfig
    tracker: RecordingTracker = field(default_factory=RecordingTracker)
    prepare: Callable[[FakeGenerator, int], None] = lambda generator, number: None
    generator: type[FakeGenerator] = FakeGenerator
    made: list[FakeGenerator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = HealingPool(
            self._make, config=self.config, tracker=self.tracker, activity=Activity()
        )

    def _make(self, index: int, num_starts: int) -> Generator:
        generator = self.generator(f"generator-{index}")
        self.prepare(generator, len(self.made))
        self.made.append(generator)
        return generator

    def admit_all(self) -> None:
        for member in self.pool.members():
            self.pool.admit(member)

    async def admit_for_ever(self) -> None:
        """As a broadcaster that never finds anything wrong."""
        while True:
            await self.pool.newcomers()
            self.admit_all()

    async def generate(self, count: int = 1) -> list[str]:
        """Which generators made so many groups, all at once."""
        tickets = await asyncio.gather(
            *(self.pool.generate(PROMPT, SAMPLING) for _ in range(count))
        )
        return [ticket.generator for ticket in tickets]

    @asynccontextmanager
    async def running(self, *, begun: bool = True) -> AsyncIterator[asyncio.Task[None]]:
        """The pool at work; all of it has ended afterwards."""
        keeping = asyncio.create_task(self.pool.run())
        admitting = asyncio.create_task(self.admit_for_ever())
        try:
            if begun:
                await self.pool.has_begun()
                await asyncio.sleep(0)
            yield keeping
        finally:
            admitting.cancel()
            keeping.cancel()
            await asyncio.wait({keeping, admitting})


@dataclass
class FakeSender:
    """A learner whose model is one number."""

    weights: float = 1.0
    policy_version: int = 0
    errors: list[Exception] = field(default_factory=list)  # of the next sends
    on_send: Callable[[Sequence[FakeGenerator]], None] = lambda receivers: None
    sent_to: list[list[str]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[int]:
        async with self.lock:
            yield self.policy_version

    async def send_weights(
        self, receivers: Sequence[FakeGenerator], *, policy_version: int
    ) -> SentWeights:
        assert all(receiver.is_paused for receiver in receivers)
        self.sent_to.append([receiver.name for receiver in receivers])
        self.on_send(receivers)
        await asyncio.sleep(1)
        if self.errors and (error := self.errors.pop(0)):
            raise error
        for receiver in receivers:
            receiver.weights = receiver.loads(self.weights)
            receiver.held = HeldWeights(
                policy_version=policy_version, num_tensors=2, checksums={"a": 1, "b": 2}
            )
        return SentWeights(
            policy_version=policy_version,
            num_tensors=2,
            num_bytes=8,
            checksums={"a": 1, "b": 2},
        )

    async def logprobs(self, token_ids: Any) -> Any:
        return np.full(len(token_ids) - 1, self.weights, dtype=np.float32)
