"""Ray actors that stand for engines and for a learner rank, and fail where they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fakes import sampled_ticket

from real_ray.errors import GenerationError, SyncError
from real_ray.roles import GeneratorProgress
from real_ray.types import Prompt, SampledTicket, Sampling
from real_ray.weights import HeldWeights, SentWeights


class Engine:
    """An async actor as `GeneratorActor` is one. Prompts say what becomes of them by their text."""

    def __init__(self) -> None:
        self._fails = ""
        self._running: set[str] = set()
        self._last = ""
        self._paused = False
        self._version = -1
        self._changed = asyncio.Condition()

    async def fail(self, at: str) -> None:
        """From now on; "" is nowhere."""
        self._fails = at

    async def generate(self, prompt: Prompt, _: Sampling) -> tuple[SampledTicket, str]:
        self._last = prompt.uid
        await self._change(lambda: self._running.add(prompt.uid))
        try:
            if prompt.text == "never ends":
                await asyncio.Event().wait()
            if prompt.text == "fails":
                raise GenerationError(f"group {prompt.uid}: no output")
        finally:
            await self._change(lambda: self._running.remove(prompt.uid))
        return sampled_ticket(prompt.uid, members=4), f"group of {prompt.uid}"

    async def until_running(self, *uids: str) -> None:
        """Wait until exactly these are generated."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == set(uids))

    async def last(self) -> str:
        """The group that it got last."""
        return self._last

    async def _change(self, change: Any) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    async def pause(self) -> None:
        self._paused = True
        if self._fails == "pause":
            raise SyncError("the engine cannot pause")

    async def resume(self) -> None:
        self._paused = False

    async def is_paused(self) -> bool:
        return self._paused

    async def load(self, version: int) -> None:
        assert self._paused
        self._version = version

    async def weights(self) -> HeldWeights:
        return HeldWeights(policy_version=self._version, num_tensors=1)

    async def progress(self) -> GeneratorProgress:
        return GeneratorProgress(num_running=len(self._running), num_tokens=0, num_finished=0)


class Rank:
    """A learner rank that sends, or does not."""

    def __init__(self) -> None:
        self._engines: list[Any] = []
        self._fails = ""
        self._failed = asyncio.Event()

    async def fail(self, how: str) -> None:
        """From now on; "" is not."""
        self._fails = how

    async def connect(self, _: Any, generators: Mapping[str, Any]) -> None:
        self._engines = list(generators.values())

    async def send_weights(self, policy_version: int) -> SentWeights:
        if self._fails == "raises":
            self._failed.set()
            raise SyncError("generator-1 could not receive the weights", ("generator-1",))
        if self._fails == "raises what nobody expects":
            raise ZeroDivisionError
        await asyncio.gather(*(engine.load.remote(policy_version) for engine in self._engines))
        return SentWeights(policy_version=policy_version, num_tensors=1, num_bytes=4)

    async def until_failed(self) -> None:
        await self._failed.wait()
