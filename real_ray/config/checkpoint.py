"""Section `checkpoint`: what is kept of the policy, and where a run goes on."""

from __future__ import annotations

from pydantic import Field

from real_ray.config.base import Place, Section


class CheckpointConfig(Section):
    save_final: bool = Field(
        True, description="Write the trained model to `model/` in the run directory at the end."
    )
    save_steps: int | None = Field(
        100,
        ge=1,
        description="Save the state of learner and driver to `checkpoints/step_N/` every so many "
        "steps, to continue from and for `real-ray export`; null: only when a run is stopped.",
    )
    save_total_limit: int | None = Field(
        2, ge=1, description="Newest checkpoints to keep; older ones are removed. null: all."
    )
    resume: Place = Field(
        "auto",
        description="`auto`: continue the run of this name from its newest complete checkpoint, if "
        "it has one; `never`: start anew; a path: continue from that checkpoint, or from the "
        "newest one of that run directory.",
    )
