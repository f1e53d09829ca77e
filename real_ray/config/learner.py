"""Section `learner`: the optimiser and its parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from real_ray.config.base import Section, Word


class LearnerConfig(Section):
    num_ranks: int = Field(1, ge=1, description="Data-parallel learner processes (one GPU each).")
    prompts_per_step: int = Field(
        8, ge=1, description="Groups per step (one policy version), over all ranks."
    )
    minibatches_per_batch: int = Field(
        1,
        ge=1,
        description="Optimiser steps per step, each on its share of the groups; pi_old stays that "
        "of the start.",
    )
    learning_rate: float = Field(2.0e-6, gt=0, le=1, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of `run.num_steps` with rising learning rate."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Weight decay of AdamW, on matrices (not on biases and norms).",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="First moment decay of AdamW.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Second moment decay of AdamW.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the gradient to this norm.")
    max_bad_steps: int = Field(
        3,
        ge=1,
        description="Optimiser steps in a row without a finite loss and gradient after which the "
        "run ends; each is skipped and its groups are saved.",
    )
    zero_stage: int = Field(2, ge=0, le=3, description="DeepSpeed ZeRO stage.")
    offload_optimizer: bool = Field(
        False, description="Keep optimiser state and master weights in CPU memory (ZeRO 1 to 3)."
    )
    offload_params: bool = Field(False, description="Keep parameters in CPU memory (ZeRO 3).")
    deepspeed: str | None = Field(
        None,
        min_length=1,
        description="JSON file with more DeepSpeed settings, as for Hugging Face trainers; null: "
        'none. What real-ray sets itself must agree, or be "auto".',
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of forward and backward; master weights are float32."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="Tokens of one forward pass, padding included. Groups that do not fit are "
        "split, with the same gradient.",
    )
    packing: bool = Field(
        True,
        description="Put sequences one after another, without padding; false: padded rows, for "
        "models whose attention cannot be replaced.",
    )
    share_prefix: bool = Field(
        True,
        description="Run the prompt of a group once for all its completions; needs "
        "`learner.packing`.",
    )
    lora_rank: int = Field(
        0, ge=0, le=512, description="Rank of LoRA adapters; 0: train all parameters."
    )
    lora_alpha: float = Field(
        32.0, gt=0, description="Scale of LoRA: updates are multiplied by alpha / rank."
    )
    lora_target_modules: list[Word] = Field(
        default=["all-linear"],
        min_length=1,
        description="Modules that get a LoRA adapter, by the end of their names; [all-linear]: "
        "every linear layer but the output layer.",
    )
    lora_sync: Literal["merged", "adapter"] = Field(
        "merged",
        description="What generators get: full weights with the adapter merged in, or the adapter "
        "alone (needs `learner.lora_rank` above 0).",
    )
    cpus_per_rank: float = Field(1.0, gt=0, description="Ray CPUs that a learner rank reserves.")
    num_threads: int = Field(
        0, ge=0, description="CPU threads of a learner rank on CPU; 0: all cores of the node."
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Further starts of the learner, in a row without a step that it had not "
        "reached before, when a rank was lost. It goes on from the newest checkpoint.",
    )
    port: int = Field(
        0, ge=0, le=65535, description="Port of rank 0 for torch.distributed; 0: a free one."
    )
    timeout_s: float = Field(1800.0, gt=0, description="Longest step, seconds.")

    @model_validator(mode="after")
    def _check_minibatches(self) -> LearnerConfig:
        if self.prompts_per_step % self.minibatches_per_batch:
            raise ValueError(
                f"minibatches_per_batch = {self.minibatches_per_batch} does not divide "
                f"prompts_per_step = {self.prompts_per_step}: all mini-batches must have equally "
                "many groups"
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> LearnerConfig:
        if self.share_prefix and not self.packing:
            raise ValueError(
                "packing = false runs padded rows, which cannot share a prefix: set "
                "learner.share_prefix: false too"
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> LearnerConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer needs learner.zero_stage 1, 2 or 3 (zero_stage is 0)"
            )
        if self.offload_params and self.zero_stage != 3:
            raise ValueError(
                f"offload_params needs learner.zero_stage 3 (zero_stage is {self.zero_stage})"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> LearnerConfig:
        if self.lora_sync == "adapter" and self.lora_rank == 0:
            raise ValueError(
                "lora_sync = adapter sends an adapter, and lora_rank = 0 trains none: set "
                "learner.lora_rank above 0, or learner.lora_sync: merged"
            )
        if "all-linear" in self.lora_target_modules and len(self.lora_target_modules) > 1:
            raise ValueError(
                "lora_target_modules has all-linear beside other names: give [all-linear] alone, "
                "or the names of modules only"
            )
        return self
