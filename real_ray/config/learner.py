"""Section `learner`: the optimiser and its parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Section


class LearnerConfig(Section):
    num_ranks: int = Field(1, ge=1, description="Data-parallel learner processes (one GPU each).")
    prompts_per_step: int = Field(8, ge=1, description="Groups per optimiser step, over all ranks.")
    learning_rate: float = Field(2.0e-6, gt=0, le=1, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of `run.num_steps` with rising learning rate."
    )
    weight_decay: float = Field(0.0, ge=0, lt=1, description="Weight decay of AdamW.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="First moment decay of AdamW.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Second moment decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the gradient to this norm.")
    zero_stage: int = Field(2, ge=0, le=3, description="DeepSpeed ZeRO stage.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of forward and backward; master weights are float32."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="Padded tokens of one forward pass; whole groups are kept together.",
    )
    cpus_per_rank: float = Field(1.0, gt=0, description="Ray CPUs that a learner rank reserves.")
    num_threads: int = Field(
        0, ge=0, description="CPU threads of a learner rank on CPU; 0: all cores of the node."
    )
    port: int = Field(
        0, ge=0, le=65535, description="Port of rank 0 for torch.distributed; 0: a free one."
    )
    timeout_s: float = Field(1800.0, gt=0, description="Longest optimiser step, seconds.")
