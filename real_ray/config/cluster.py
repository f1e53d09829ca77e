"""Section `cluster`: which Ray cluster the run uses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Section


class ClusterConfig(Section):
    address: str = Field(
        "auto",
        min_length=1,
        description="`local`: start Ray on this machine; a Ray address: join it; `auto`: join the "
        "cluster of RAY_ADDRESS (set inside `ray job submit`), else local.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models run; auto: cuda if the cluster has GPUs."
    )
    num_cpus: int | None = Field(
        None, ge=1, description="CPUs of a local Ray; null: what this machine has."
    )
    autoscaler: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="Whether nodes may be added to the cluster when it is too small: `yes`: wait "
        "for them up to `start_timeout_s`; `no`: refuse the run at once; `auto`: ask Ray.",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest wait for a part of the run to be placed, and then to start, seconds.",
    )
