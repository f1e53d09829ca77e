"""What launcher, pools and actors say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from real_ray.config import LearnerConfig, LossConfig
from real_ray.partial_metrics import PartialMetrics
from real_ray.types import IntArray, SampleRecord


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """A fixed sequence whose completion log-probs tell whether a generator has the right weights.

    Tokens that the policy would itself sample: unlikely ones differ more by rounding.
    """

    token_ids: IntArray  # [prompt + completion]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorWeights:
    """The weights that a generator says it holds."""

    policy_version: int
    num_tensors: int  # of the last update


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
    config: LearnerConfig
    loss: LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """One rank's part of an optimiser step."""

    metrics: PartialMetrics
    grad_norm: float  # of the whole gradient, before clipping
    learning_rate: float
    num_microbatches: int
    samples: tuple[SampleRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRendezvous:
    """Where and how learner and generators form their weight-transfer group."""

    backend: str
    master_address: str
    master_port: int
    num_generators: int
    workers_per_generator: int
    timeout_s: float

    @property
    def world_size(self) -> int:
        """The sending learner rank and every worker of every generator."""
        return 1 + self.num_generators * self.workers_per_generator


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What the learner sent."""

    num_tensors: int
    num_bytes: int
