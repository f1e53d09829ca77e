"""A small vLLM engine on CPU, in float32, and a generator that lets a test see into its own."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from actors.generator import GeneratorActor
from actors.protocol import EngineSpec
from real_ray.types import Prompt, SampledGroup, SampledTicket, Sampling


def engine_spec(model: Path, **changes: Any) -> EngineSpec:
    """For `GeneratorActor`: an engine of this model, without LoRA unless that is changed."""
    spec = EngineSpec(
        name="generator-0",
        model=str(model),
        trust_remote_code=False,
        device="cpu",
        dtype="float32",
        seed=0,
        max_model_length=128,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        kv_cache_bytes=2**28,
        num_threads=1,
        enforce_eager=True,
        in_flight_updates=True,
        recompute_kv=True,
        sync_backend="gloo",
        engine_checksums=False,
        max_lora_rank=0,
        lora_target_modules=(),
    )
    return dataclasses.replace(spec, **changes)


class WatchedGenerator(GeneratorActor):
    """Tells whether its engine has anything to do, and changes how it takes new weights."""

    async def set_in_flight_updates(self, in_flight_updates: bool) -> None:
        self._spec = dataclasses.replace(self._spec, in_flight_updates=in_flight_updates)

    async def until_busy(self) -> None:
        while not await self.is_busy():
            pass

    async def is_busy(self) -> bool:
        """Whether the engine has a request. One that has does a step before it answers."""
        busy: bool = await self._engine.engine_core.call_utility_async("has_work")
        return busy or bool(self._engine.output_processor.request_states)


class PacedGenerator(GeneratorActor):
    """Makes one group after another, each in the same time, however fast the machine is."""

    SECONDS = 0.4

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._one_at_a_time = asyncio.Semaphore(1)

    async def generate(
        self, prompt: Prompt, sampling: Sampling
    ) -> tuple[SampledTicket, SampledGroup]:
        async with self._one_at_a_time:
            made, _ = await asyncio.gather(
                super().generate(prompt, sampling), asyncio.sleep(self.SECONDS)
            )
        return made
