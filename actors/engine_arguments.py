"""With what arguments vLLM's engine is started."""

from __future__ import annotations

from typing import Any, get_args

from actors.protocol import EngineSpec
from real_ray.policy.lora import lora_layers


def engine_arguments(spec: EngineSpec, *, worker_extension: str) -> Any:
    """vLLM's `AsyncEngineArgs`.

    Args:
        worker_extension: class that is added to vLLM's worker, as `module.Class`.

    Raises:
        ModelError: `lora_target_modules` does not fit the model.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
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
        worker_extension_cls=worker_extension,
        **_lora_arguments(spec),
        **_cpu_arguments(spec),
        disable_log_stats=True,
    )


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
