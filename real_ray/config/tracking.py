"""Section `tracking`: where metrics and samples go, besides the run directory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Section


class TrackingConfig(Section):
    samples: bool = Field(True, description="Write every trained-on completion to `samples/`.")
    wandb: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="Weights & Biases; `offline` needs no account."
    )
    wandb_project: str = Field("real-ray", min_length=1, description="Project in wandb.")
