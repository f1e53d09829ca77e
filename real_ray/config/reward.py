"""Section `reward`: how completions are scored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Section


class RewardConfig(Section):
    function: str = Field(
        "exact_match",
        min_length=1,
        description="Built-in (`exact_match`, `last_number`), or your own as "
        "`package.module:function`.",
    )
    num_workers: int = Field(2, ge=1, description="Reward worker processes.")
    cpus_per_worker: float = Field(0.25, gt=0, description="Ray CPUs that a worker reserves.")
    timeout_s: float = Field(60.0, gt=0, description="Longest scoring of one group, seconds.")
    max_retries: int = Field(1, ge=0, description="Further tries of a group whose scoring failed.")
    on_error: Literal["stop", "drop"] = Field(
        "drop",
        description="A group that cannot be scored is dropped (the run ends after "
        "`run.max_consecutive_failures`), or stops the run.",
    )
