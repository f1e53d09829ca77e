"""Section `rollout`: how completions are generated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from real_ray.config.base import Section, Word
from real_ray.errors import ConfigError


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
    min_generators: int | None = Field(
        None,
        ge=1,
        description="Engines that a run needs, to begin and to go on; null: all of "
        "`num_generators` to begin, one to go on.",
    )
    max_generators: int | None = Field(
        None,
        ge=1,
        description="Add engines up to this number when the cluster has room for them (its "
        "autoscaler is asked to make some); null: `num_generators`, "
        "and any number for `real-ray scale`.",
    )
    recovery_s: float = Field(
        1800.0,
        gt=0,
        description="Time with fewer than `min_generators`, seconds, after which the run saves a "
        "checkpoint and ends.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Further starts of an engine that was lost, in a row without a finished "
        "group; the pauses before them double from 1 s to 60 s.",
    )
    stall_s: float = Field(
        300.0,
        gt=0,
        description="Time in which an engine with unfinished completions samples no token, or "
        "does not answer, seconds, after which it is replaced. Weight syncs do not count.",
    )
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

    @property
    def num_to_begin(self) -> int:
        """Engines that a run waits for before it begins."""
        return self.num_generators if self.min_generators is None else self.min_generators

    @property
    def num_to_go_on(self) -> int:
        """Engines without which a run does not go on."""
        return self.min_generators or 1

    @property
    def num_wanted(self) -> int:
        """Engines that a run would have."""
        return self.max_generators or self.num_generators

    def check_scale(self, num_generators: int) -> None:
        """Check a number of engines that somebody asks for while the run goes on.

        Raises:
            ConfigError: below `min_generators` or above `max_generators`.
        """
        least, most = self.num_to_go_on, self.max_generators
        if num_generators < least or (most is not None and num_generators > most):
            raise ConfigError(
                f"cannot scale to {num_generators} generators: the run allows "
                + (f"{least} or more" if most is None else f"{least} to {most}")
                + " (rollout.min_generators, rollout.max_generators)"
            )

    @model_validator(mode="after")
    def _check_num_generators(self) -> RolloutConfig:
        least, most = self.min_generators or 1, self.max_generators or self.num_generators
        if not least <= self.num_generators <= most:
            raise ValueError(
                f"num_generators = {self.num_generators} must be at least min_generators = {least} "
                f"and at most max_generators = {most}. Change num_generators, or these bounds"
            )
        return self

    @model_validator(mode="after")
    def _refuse_truncated_sampling(self) -> RolloutConfig:
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_sampling:
            raise ValueError(
                f"top_p = {self.top_p} and top_k = {self.top_k} cut the sampled distribution: the "
                "learner would read the constant shift of the log-probs as score. Use top_p: 1.0 "
                "and top_k: 0, or set rollout.allow_truncated_sampling: true"
            )
        return self
