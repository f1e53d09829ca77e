"""The frozen policy that the KL term compares with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.protocol import LearnerSpec
from actors.train_batch import PolicyCall
from real_ray.policy import PolicyInput, load_policy
from real_ray.policy.lora import without_lora

_OPTIMIZER_ONLY = "offload_optimizer"


def build_reference(spec: LearnerSpec, engine: Any) -> PolicyCall:
    """The model as given, frozen; all ranks together.

    With LoRA it is the policy without its adapter, which takes no memory. Otherwise the model is
    loaded a second time and, under ZeRO-3, partitioned like the policy.

    Args:
        engine: the DeepSpeed engine of the policy.
    """
    if spec.config.lora_rank:

        def base_model(inputs: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
            with without_lora(engine.module.model):
                logprobs, entropy = engine(inputs, temperature)
            return logprobs, entropy

        return base_model

    import deepspeed

    policy = load_policy(
        spec.model,
        dtype=getattr(torch, spec.config.dtype),
        packing=spec.config.packing,
        trust_remote_code=spec.trust_remote_code,
    ).requires_grad_(False)
    if spec.config.zero_stage < 3:
        return policy.to(spec.device)
    zero = {k: v for k, v in spec.deepspeed["zero_optimization"].items() if k != _OPTIMIZER_ONLY}
    frozen, _, _, _ = deepspeed.initialize(
        model=policy, config={**spec.deepspeed, "zero_optimization": zero}
    )
    result: PolicyCall = frozen
    return result
