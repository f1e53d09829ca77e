"""Section `sync`: how new weights reach the generators."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Section


class SyncConfig(Section):
    backend: Literal["auto", "nccl", "nccl_m2n", "gloo"] = Field(
        "auto",
        description="Weight transfer; auto: nccl with GPUs, gloo without. nccl_m2n: all learner "
        "ranks send (needs NVIDIA's package nccl.m2n).",
    )
    bucket_mib: int = Field(
        64,
        ge=1,
        description="Memory that tensors are packed into for one broadcast, MiB; learner and "
        "generators have two or three at a time. A larger tensor goes alone. gloo takes "
        "no more than 16.",
    )
    port: int = Field(
        0, ge=0, le=65535, description="Port of the transfer's rendezvous; 0: a free one."
    )
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="Longest call of a weight sync (pause, transfer, resume, probe), seconds.",
    )
    probe: bool = Field(
        True,
        description="After each sync compare log-probs of a fixed sequence with the learner's.",
    )
    probe_tolerance: float = Field(
        0.2, gt=0, description="Largest mean |log-prob difference| that the probe accepts."
    )
    engine_checksums: bool = Field(
        False,
        description="Compare vLLM's checksums of all weights between generators after each sync, "
        "where the back end has none of its own (nccl): seconds for a large model.",
    )
