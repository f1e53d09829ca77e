"""Section `checkpoint`: what is kept of the policy."""

from __future__ import annotations

from pydantic import Field

from real_ray.config.base import Section


class CheckpointConfig(Section):
    save_final: bool = Field(
        True, description="Write the trained model to `model/` in the run directory at the end."
    )
