"""GeneratorActor: one vLLM engine that samples whole groups and takes new weights while it runs."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from actors.node import num_cores
from actors.protocol import AdapterUpdate, EngineSpec
from actors.stacks import enable_stacks
from real_ray.errors import ActorDiedError, GenerationError, SyncError
from real_ray.policy.lora import lora_layers
from real_ray.roles import GeneratorProgress
from real_ray.types import (
    Completion,
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    SampledGroup,
    SampledTicket,
    Sampling,
    VersionSpan,
)
from real_ray.weights import HeldWeights

_ADAPTER_ID = 1  # the same for all versions


class GeneratorActor:
    """A Ray actor around `vllm.v1.engine.async_llm.AsyncLLM`."""

    _worker_extension = "actors.engine_checks.EngineChecks"

    def __init__(self, spec: EngineSpec) -> None:
        enable_stacks()
        self._spec = spec
        self._requests = self._finished = 0
        self._num_tensors = 0  # of the last update
        self._update_under_way = False
        self._broke_off = False  # the last update did
        self._adapter: Any = None  # vLLM's LoRARequest that every request carries
        self._adapter_checksums: dict[str, int] = {}

    async def start(self) -> None:
        """Start the engine. Weights are those of the model directory, version 0."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        spec = self._spec
        if spec.device == "cpu":  # for the engine's processes; Ray allows an actor one thread
            os.environ["OMP_NUM_THREADS"] = str(spec.num_threads or num_cores())
            if spec.enforce_eager:  # vLLM's sampler would still have some functions compiled
                os.environ["TORCHDYNAMO_DISABLE"] = "1"
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=spec.model,
                trust_remote_code=spec.trust_remote_code,
                dtype=spec.dtype,
                hf_overrides={"head_dtype": "float32"},  # as in the learner
                seed=spec.seed,
                max_model_len=spec.max_model_length,
                tensor_parallel_size=spec.tensor_parallel_size,
                gpu_memory_utilization=spec.gpu_memory_utilization,
                kv_cache_memory_bytes=spec.kv_cache_bytes,
                enforce_eager=spec.enforce_eager,
                # Stale blocks must never serve a new request, so without a cleared cache
                # there is no prefix cache.
                enable_prefix_caching=spec.recompute_kv,
                # The learner compares with the log-probs of the distribution sampled from.
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                weight_transfer_config={"backend": spec.sync_backend},
                worker_extension_cls=self._worker_extension,
                **_lora_arguments(spec),
                **_cpu_arguments(spec),
                disable_log_stats=True,
            )
        )
        await self._engine.update_weight_version("0")

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
                lora_request=self._adapter,
            ):
                final = output
        except Exception as error:
            if self._engine.errored:  # no other request can succeed either
                raise ActorDiedError(
                    f"the engine of {self._spec.name} has died: {error}"
                ) from error
            raise GenerationError(f"group {prompt.uid} on {self._spec.name}: {error}") from error
        if final is None or not final.finished:
            raise GenerationError(f"group {prompt.uid} on {self._spec.name}: no final output")
        self._finished += 1
        completions = tuple(
            _completion(prompt.uid, output)
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
        if self._engine.errored:
            raise ActorDiedError(f"the engine of {self._spec.name} has died")
        running = list(self._engine.output_processor.request_states.values())
        return GeneratorProgress(
            num_running=len(running),
            num_tokens=sum(s.detokenizer.num_output_tokens() for s in running if s.detokenizer),
            num_finished=self._finished,
        )

    async def pause(self) -> None:
        """Stop sampling: at once and keeping what runs, or after what runs has finished."""
        await self._engine.pause_generation(
            mode="keep" if self._spec.in_flight_updates else "wait",
            clear_cache=self._spec.recompute_kv,
        )

    async def resume(self) -> None:
        """Go on sampling, under the weights that are loaded by then."""
        await self._abandon_update()  # of an update that nobody ended: layers have no weights
        await self._engine.resume_generation()

    # The four methods of vLLM's weight-sync client protocol, called by the sending learner rank.

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join a weight-transfer group; an earlier one is left first."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._abandon_update()
        await self._engine.shutdown_weight_transfer_engine()
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def start_weight_update(self) -> None:
        """Begin an update; one that was interrupted is abandoned first."""
        await self._abandon_update()
        self._update_under_way = True
        self._num_tensors = 0
        await self._engine.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensors. After an error the engine can run, on weights of two versions.

        `weights` tells so until the next complete update.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info))
        except Exception:
            if not self._engine.errored:
                await self._abandon_update()
            raise
        self._num_tensors += len(update_info["names"])

    async def finish_weight_update(self, policy_version: int) -> None:
        await self._engine.finish_weight_update(weight_version=str(policy_version))
        self._update_under_way = self._broke_off = False

    async def _abandon_update(self) -> None:
        if self._update_under_way:
            await self._engine.collective_rpc("abandon_weight_update")
            self._update_under_way, self._broke_off = False, True

    async def load_adapter(self, update: AdapterUpdate) -> None:
        """Replace the LoRA adapter; needs a paused engine, whose requests go on under the new one.

        Before the first one the base model answers, and no request may be unfinished: one that
        began without an adapter would never get it.

        Raises:
            SyncError: vLLM did not take it.
        """
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None or not self._engine.output_processor.request_states
        with tempfile.TemporaryDirectory(prefix="real-ray-adapter-") as directory:
            await asyncio.to_thread(_write_files, Path(directory), update.files)
            # Running requests refer to the id. The path is part of the key of cached prefixes.
            adapter = LoRARequest("policy", _ADAPTER_ID, directory)
            await self._engine.add_lora(
                LoRARequest("policy", _ADAPTER_ID, directory, load_inplace=True)
            )
        unused, *_ = await self._engine.collective_rpc("unused_adapter_layers", args=(_ADAPTER_ID,))
        if unused:
            raise SyncError(
                f"{self._spec.name}: vLLM has no place for the adapter of {', '.join(unused)}: set "
                "learner.lora_sync: merged, or leave them out of learner.lora_target_modules"
            )
        # Requests must not carry `load_inplace`, or each step would read the files again.
        self._adapter = adapter
        self._num_tensors = update.num_tensors
        self._adapter_checksums = _checksums(update.files)
        # Not finish_weight_update(): that ends a transfer of full weights and drops all adapters.
        await self._engine.update_weight_version(str(update.policy_version))

    async def weights(self) -> HeldWeights:
        """What this generator says it holds: version, tensors, and what is wrong with them."""
        version = int(await self._engine.get_weight_version())
        problems = ["an update broke off: weights of two versions"] if self._broke_off else []
        checksums = self._adapter_checksums
        if not checksums:
            workers = await self._engine.collective_rpc("received_weights")
            checksums = workers[0][0]
            for index, (sums, found) in enumerate(workers):
                where = f"worker {index}: " if len(workers) > 1 else ""
                problems += [where + problem for problem in found]
                if sums != checksums:
                    problems.append(f"worker {index} received other weights than worker 0")
        return HeldWeights(
            policy_version=version,
            num_tensors=self._num_tensors,
            checksums=checksums,
            problems=tuple(problems),
        )

    async def probe(self, token_ids: IntArray) -> FloatArray:
        """Log-probs, at temperature 1, of each token of a sequence but the first: [T - 1]."""
        from vllm import SamplingParams

        self._requests += 1
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        final = None
        async for output in self._engine.generate(
            {"prompt_token_ids": token_ids.tolist()},
            params,
            f"probe#{self._requests}",
            lora_request=self._adapter,
        ):
            final = output
        assert final is not None
        assert final.prompt_logprobs is not None
        entries = zip(token_ids[1:].tolist(), final.prompt_logprobs[1:], strict=True)
        return np.array([entry[token].logprob for token, entry in entries], dtype=np.float32)

    async def shutdown(self) -> None:
        """Stop the engine's processes."""
        await asyncio.to_thread(self._engine.shutdown)


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments that vLLM's defaults for CPUs do not suit."""
    if spec.device != "cpu":
        return {}
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments: dict[str, Any] = {
        # Of prompts only whole blocks are shared by a group. By default they have 128 tokens.
        "block_size": 32,
    }
    if spec.tensor_parallel_size == 1:
        # The model runs in the process of the scheduler. A second process and the first would wait
        # for each other by polling, on cores that the learner needs.
        arguments["distributed_executor_backend"] = UniProcExecutor
    return arguments


def _lora_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of an engine that takes adapters; none if syncs bring full weights.

    Raises:
        ModelError: `lora_target_modules` does not fit the model.
    """
    if not spec.max_lora_rank:
        return {}
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.config.lora import MaxLoRARanks

    config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    layers = lora_layers(model, spec.lora_target_modules)
    return {
        "enable_lora": True,
        "max_lora_rank": next(r for r in get_args(MaxLoRARanks) if r >= spec.max_lora_rank),
        # By default vLLM makes the output layer ready for adapters too. That costs memory, and the
        # log-probs of a probe that runs beside other requests fail.
        "lora_target_modules": sorted({name.rpartition(".")[-1] for name in layers}),
    }


def _checksums(files: Mapping[str, bytes]) -> dict[str, int]:
    """Of the tensors in an adapter's files."""
    from safetensors.torch import load

    from actors.buckets import checksum

    return {
        name: checksum(tensor)
        for file, content in files.items()
        if file.endswith(".safetensors")
        for name, tensor in load(content).items()
    }


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _completion(uid: str, output: Any) -> Completion:
    """Translate vLLM's `CompletionOutput`.

    Raises:
        GenerationError: aborted, without log-probs or versions, or with log-probs that are no
            log-probs.
    """
    where = f"group {uid}, member {output.index}"
    token_ids = np.array(output.token_ids, dtype=np.int32)
    if output.finish_reason not in ("stop", "length"):
        raise GenerationError(f"{where}: the engine ended it with {output.finish_reason!r}")
    reason: FinishReason = output.finish_reason
    if output.logprobs is None or not output.weight_versions:
        raise GenerationError(f"{where}: the engine returned no log-probs or no weight versions")
    logprobs = np.array(
        [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ],
        dtype=np.float32,
    )
    if not np.isfinite(logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise GenerationError(
            f"{where}: the engine's log-prob of token {position} is {logprobs[position]}"
        )
    spans = tuple(
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in output.weight_versions
    )
    return Completion(
        index=output.index,
        token_ids=token_ids,
        generator_logprobs=logprobs,
        spans=spans,
        text=output.text,
        finish_reason=reason,
    )
