"""Section `checkpoint`: what is kept of the policy."""

from __future__ import annotations

from pydantic import Field

from real_ray.config.base import Section


class CheckpointConfig(Section):
    save_final: bool = Field(
        True, description="Write the trained model to `model/` in the run directory at the end."
    )
    save_steps: int | None = Field(
        None,
        ge=1,
        description="Save the learner's state to `checkpoints/step_N/` every so many steps, for "
        "`real-ray export`; null: never.",
    )
