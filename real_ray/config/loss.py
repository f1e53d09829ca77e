"""Section `loss`: REAL, the losses to compare it with, and pi_old."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from real_ray.config.base import Section


class LossConfig(Section):
    type: Literal["real", "real_bce", "grpo", "dapo", "gspo"] = Field(
        "real",
        description="Loss function; all but `real` are there to compare it with.",
    )
    tau: float = Field(
        0.5, gt=0, le=100, description="Temperature of the classification (real, real_bce)."
    )
    labels: Literal["threshold", "group_mean"] = Field(
        "threshold",
        description="A completion is positive if its reward is above `loss.positive_above`, or "
        "above the mean reward of its group.",
    )
    positive_above: float = Field(
        0.0, description="Rewards above this are positive (`loss.labels: threshold`, evaluation)."
    )
    truncated: Literal["include", "exclude"] = Field(
        "include",
        description="Completions that ended by length: trained on as they are, or left out of "
        "their groups, neither positive nor negative.",
    )
    group_denominator: Literal["all", "valid"] = Field(
        "all", description="Average over all groups of the batch, or over the two-sided ones."
    )
    old_logprobs: Literal["behaviour", "proximal", "blend"] = Field(
        "behaviour",
        description="pi_old: what the generator sampled with, the learner's own log-probs at the "
        "start of the batch, or both (`loss.blend_lambda`).",
    )
    blend_lambda: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the mismatch of learner and generator that stays in the score "
        "(`loss.old_logprobs: blend`); 0: proximal, 1: behaviour.",
    )
    beta: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the KL divergence from the model as given; above 0 loads it as a "
        "frozen reference.",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Lower clip range of the ratio (grpo, dapo, gspo); null: that of the paper.",
    )
    epsilon_high: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Upper clip range of the ratio (grpo, dapo, gspo); null: that of the paper, "
        "or `loss.epsilon` for grpo.",
    )

    @model_validator(mode="after")
    def _refuse_clipping(self) -> LossConfig:
        for name in ("epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and self.type in ("real", "real_bce"):
                raise ValueError(
                    f"{name} = {value}, but loss.type {self.type} has no importance ratio and "
                    f"clips nothing. Remove loss.{name}, or use loss.type grpo, dapo or gspo"
                )
        return self
