"""GeneratorActor: one vLLM engine that samples whole groups and takes new weights while it runs."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from actors.completions import completion_of
from actors.engine_arguments import engine_arguments
from actors.engine_weights import EngineWeights
from actors.node import num_cores
from actors.protocol import AdapterUpdate, EngineSpec
from actors.stacks import enable_stacks
from real_ray.errors import ActorDiedError, GenerationError, SyncError
from real_ray.roles import GeneratorProgress
from real_ray.types import (
    FloatArray,
    IntArray,
    Prompt,
    SampledGroup,
    SampledTicket,
    Sampling,
)
from real_ray.weights import HeldWeights

_POLL_S = 1.0  # between looks at whether an engine that does not answer is there


class GeneratorActor:
    """A Ray actor around `vllm.v1.engine.async_llm.AsyncLLM`."""

    _worker_extension = "actors.engine_checks.EngineChecks"

    def __init__(self, spec: EngineSpec) -> None:
        enable_stacks()
        self._spec = spec
        self._requests = self._finished = 0
        self._weights = EngineWeights(
            self._call, name=spec.name, engine_checksums=spec.engine_checksums
        )

    async def start(self) -> None:
        """Start the engine. Weights are those of the model directory, version 0."""
        from vllm.v1.engine.async_llm import AsyncLLM

        spec = self._spec
        if spec.device == "cpu":  # for the engine's processes; Ray allows an actor one thread
            os.environ["OMP_NUM_THREADS"] = str(spec.num_threads or num_cores())
            if spec.enforce_eager:  # vLLM's sampler would still have some functions compiled
                os.environ["TORCHDYNAMO_DISABLE"] = "1"
        self._engine = AsyncLLM.from_engine_args(
            engine_arguments(spec, worker_extension=self._worker_extension)
        )
        await self._call("update_weight_version", "0")

    async def generate(
        self, prompt: Prompt, sampling: Sampling
    ) -> tuple[SampledTicket, SampledGroup]:
        """Sample one whole group (two Ray returns: the ticket, and the group itself).

        Raises:
            GenerationError: the engine failed this request or returned unusable output.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        began = time.monotonic()
        self._requests += 1
        request_id = f"{prompt.uid}#{self._requests}"
        params = SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            logprobs=0,
            # All members arrive together, in the one final output: a group is never in pieces.
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": prompt.token_ids.tolist()},
                params,
                request_id,
                lora_request=self._weights.adapter,
            ):
                final = output
        except Exception as error:
            self._check_engine()  # without it no other request can succeed either
            raise GenerationError(f"group {prompt.uid} on {self._spec.name}: {error}") from error
        if final is None or not final.finished:
            raise GenerationError(f"group {prompt.uid} on {self._spec.name}: no final output")
        self._finished += 1
        completions = tuple(
            completion_of(prompt.uid, output)
            for output in sorted(final.outputs, key=lambda o: o.index)
        )
        group = SampledGroup(prompt=prompt, num_generations=sampling.n, completions=completions)
        ticket = SampledTicket(
            uid=prompt.uid,
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=tuple(len(c.token_ids) for c in completions),
            truncated=tuple(c.finish_reason == "length" for c in completions),
            oldest_version=min(c.oldest_version for c in completions),
            newest_version=max(c.newest_version for c in completions),
            seconds=time.monotonic() - began,
            generator=self._spec.name,
            ref=None,
        )
        return ticket, group

    async def progress(self) -> GeneratorProgress:
        """What the engine has done, as far as its front end knows.

        Raises:
            ActorDiedError: a process of the engine is gone.
        """
        self._check_engine()
        running = list(self._engine.output_processor.request_states.values())
        return GeneratorProgress(
            num_running=len(running),
            num_tokens=sum(s.detokenizer.num_output_tokens() for s in running if s.detokenizer),
            num_finished=self._finished,
        )

    async def pause(self) -> None:
        """Stop sampling: at once and keeping what runs, or after what runs has finished."""
        await self._call(
            "pause_generation",
            mode="keep" if self._spec.in_flight_updates else "wait",
            clear_cache=self._spec.recompute_kv,
        )

    async def resume(self) -> None:
        """Go on sampling, under the weights that are loaded by then."""
        await self._weights.abandon()  # of an update that nobody ended: layers have no weights
        await self._call("resume_generation")

    # The four methods of vLLM's weight-sync client protocol, called by the sending learner rank.

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        await self._weights.join(init_info)

    async def start_weight_update(self) -> None:
        await self._weights.start()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        await self._weights.update(update_info)

    async def finish_weight_update(self, policy_version: int) -> None:
        await self._weights.finish(policy_version)

    async def load_adapter(self, update: AdapterUpdate) -> None:
        # Before the first one the base model answers. A request that began without an adapter would
        # never get it.
        num_requests = len(self._engine.output_processor.request_states)
        if self._weights.adapter is None and num_requests:
            raise SyncError(
                f"{self._spec.name}: {num_requests} completions are under way on the model without "
                "an adapter, and the first adapter cannot reach them. The generator is replaced; "
                "no generator may sample before its first weight sync"
            )
        await self._weights.load_adapter(update)

    async def weights(self) -> HeldWeights:
        """What this generator says it holds: version, tensors, and what is wrong with them."""
        return await self._weights.held()

    async def probe(self, token_ids: IntArray) -> FloatArray:
        """Log-probs, at temperature 1, of each token of a sequence but the first: [T - 1]."""
        from vllm import SamplingParams

        self._requests += 1
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        final = None
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": token_ids.tolist()},
                params,
                f"probe#{self._requests}",
                lora_request=self._weights.adapter,
            ):
                final = output
        except Exception:
            self._check_engine()
            raise
        assert final is not None
        assert final.prompt_logprobs is not None
        entries = zip(token_ids[1:].tolist(), final.prompt_logprobs[1:], strict=True)
        return np.array([entry[token].logprob for token, entry in entries], dtype=np.float32)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The engine's answer to a call. vLLM waits for ever for that of an engine that dies.

        Raises:
            ActorDiedError: a process of the engine is gone.
        """
        call = asyncio.ensure_future(getattr(self._engine, method)(*arguments, **named))
        try:
            while not call.done():
                self._check_engine()
                await asyncio.wait({call}, timeout=_POLL_S)
            return call.result()
        except Exception:
            self._check_engine()
            raise
        finally:
            call.cancel()

    def _check_engine(self) -> None:
        if self._engine.errored:
            raise ActorDiedError(f"the engine of {self._spec.name} has died")

    async def shutdown(self) -> None:
        """Stop the engine's processes."""
        await asyncio.to_thread(self._engine.shutdown)
