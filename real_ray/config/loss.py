"""Section `loss`: REAL and its temperature."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Section


class LossConfig(Section):
    type: Literal["real"] = Field("real", description="Loss function.")
    tau: float = Field(0.5, gt=0, le=100, description="Temperature of the classification.")
    positive_above: float = Field(
        0.0, description="A completion is positive if its reward is above this."
    )
    group_denominator: Literal["all", "valid"] = Field(
        "all", description="Average over all groups of the batch, or over the two-sided ones."
    )
    old_logprobs: Literal["behaviour"] = Field(
        "behaviour", description="pi_old: the log-probs that the generator sampled with."
    )
