"""What launcher, pools and actors say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from real_ray.batching import Microbatch
from real_ray.config import LearnerConfig, LossConfig
from real_ray.partial_metrics import PartialMetrics
from real_ray.types import FloatArray, SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything a `GeneratorActor` needs to start its engine."""

    name: str
    model: str  # directory or hub name
    trust_remote_code: bool
    device: str  # "cpu" or "cuda"
    dtype: str
    seed: int
    max_model_length: int  # tokens
    tensor_parallel_size: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None  # None: from gpu_memory_utilization
    num_threads: int  # on CPU; 0: all cores
    enforce_eager: bool
    in_flight_updates: bool
    recompute_kv: bool
    sync_backend: str
    engine_checksums: bool  # tell vLLM's own after a sync without others
    max_lora_rank: int  # of the adapter that syncs bring; 0: syncs bring full weights
    lora_target_modules: tuple[str, ...]  # as in the learner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterUpdate:
    """A LoRA adapter for the generators."""

    policy_version: int
    num_tensors: int
    files: Mapping[str, bytes]  # of a peft adapter directory, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """Everything a `LearnerActor` needs to start its rank."""

    rank: int
    world_size: int
    model: str  # directory or hub name
    trust_remote_code: bool
    device: str  # "cpu" or "cuda"
    seed: int
    num_threads: int  # on CPU; 0: all cores
    num_steps: int  # optimiser steps of the run, for the schedule
    temperature: float  # of the sampling
    run_directory: str  # for what a user has to see when a step fails
    config: LearnerConfig
    loss: LossConfig
    deepspeed: dict[str, Any]  # settings of `deepspeed.initialize`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimiserStep:
    """What a rank is to do in one optimiser step: on its own slices, by what all ranks know.

    Arrays are [G, N]: all groups of the step, whichever rank they are on.
    """

    microbatches: tuple[Microbatch, ...]
    score_passes: tuple[Microbatch, ...]  # see `StepPlan.score_passes`
    cut: frozenset[int]  # groups that are in several micro-batches
    rewards: FloatArray
    included: npt.NDArray[np.bool_]
    num_tokens: npt.NDArray[np.int64]  # of each completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRequest:
    """A rank's work on one batch. Its groups come with it, each with its `GroupPosition`."""

    policy_version: int  # after the batch
    steps: tuple[OptimiserStep, ...]
    positions: tuple[GroupPosition, ...]  # of each group argument


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """Where a group belongs: the optimiser step, and its row in the arrays of that."""

    step: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """One rank's part in a batch."""

    metrics: PartialMetrics
    learning_rate: float  # of the last optimiser step
    samples: tuple[SampleRecord, ...]
    warnings: tuple[str, ...]  # the same on all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRendezvous:
    """Where and how learner and generators form their weight-transfer group."""

    backend: str
    master_address: str
    master_port: int
    num_generators: int
    workers_per_generator: int
    timeout_s: float
    bucket_bytes: int  # most that is sent at once

    @property
    def world_size(self) -> int:
        """The sending learner rank and every worker of every generator."""
        return 1 + self.num_generators * self.workers_per_generator
