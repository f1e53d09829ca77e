"""Section `rollout`: how completions are generated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from real_ray.config.base import Section, Word


class RolloutConfig(Section):
    num_generations: int = Field(8, ge=2, description="Completions per prompt (group size).")
    temperature: float = Field(0.6, gt=0, le=10, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1.0: off.")
    top_k: int = Field(0, ge=0, description="Sample from the k likeliest tokens; 0: off.")
    allow_truncated_sampling: bool = Field(
        False,
        description="Permit top_p < 1 or top_k > 0, which shifts the log-probs that REAL reads "
        "as score.",
    )
    max_completion_length: int = Field(512, ge=1, description="Longest completion in tokens.")
    stop: list[Word] = Field(default=[], description="Strings that end a completion.")
    max_staleness: int = Field(
        1, ge=0, le=8, description="Policy versions that a group may be behind; 0: synchronous."
    )
    oversample: float | None = Field(
        None,
        ge=1,
        le=9,
        description="Groups in the pipeline, as a multiple of `learner.prompts_per_step`; at most "
        "`max_staleness` + 1, which null means. What a step leaves over waits for the next one.",
    )
    dynamic_sampling: bool = Field(
        False,
        description="Sample another prompt in place of a group with one class only, which has no "
        "gradient.",
    )
    max_resample_times: float = Field(
        3.0,
        gt=0,
        description="With `dynamic_sampling`: replace at most so many times "
        "`learner.prompts_per_step` groups for one step, rounded but at least one; after that it "
        "trains on what it has.",
    )
    straggler: Literal["wait", "evict"] = Field(
        "wait",
        description="What to do with a group that is not scored `straggler_s` after its start: "
        "wait for it, or abort it and sample another prompt instead.",
    )
    straggler_s: float = Field(
        600.0, gt=0, description="Time from the start of a group after which it is late, seconds."
    )
    in_flight_updates: bool = Field(
        True,
        description="Update weights while completions run (they continue under the new weights); "
        "false: let them finish first.",
    )
    recompute_kv: bool = Field(
        True, description="Recompute the KV cache of running completions after a weight update."
    )
    num_generators: int = Field(1, ge=1, description="vLLM engines.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs per generator.")
    cpus_per_generator: float = Field(1.0, gt=0, description="Ray CPUs that a generator reserves.")
    num_threads: int = Field(
        0, ge=0, description="CPU threads of a generator on CPU; 0: all cores of the node."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Weights and activations in the engine; auto: `learner.dtype`."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of GPU memory for the engine."
    )
    cpu_kv_cache_gib: float = Field(1.0, gt=0, description="KV cache of a generator on CPU, GiB.")
    max_model_length: int | None = Field(
        None, ge=2, description="Longest prompt + completion, tokens; null: from the two limits."
    )
    max_retries: int = Field(
        2, ge=0, description="Further tries of a group whose generation failed."
    )
    timeout_s: float = Field(1800.0, gt=0, description="Longest generation of one group, seconds.")
    enforce_eager: bool = Field(True, description="No compilation or CUDA graphs in the engine.")

    @model_validator(mode="after")
    def _refuse_truncated_sampling(self) -> RolloutConfig:
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_sampling:
            raise ValueError(
                f"top_p = {self.top_p} and top_k = {self.top_k} cut the sampled distribution: the "
                "learner would read the constant shift of the log-probs as score. Use top_p: 1.0 "
                "and top_k: 0, or set rollout.allow_truncated_sampling: true"
            )
        return self
