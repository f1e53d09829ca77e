"""Section `eval`: accuracy on held-out prompts (`data.eval`), greedy."""

from __future__ import annotations

from pydantic import Field

from real_ray.config.base import Section


class EvalConfig(Section):
    num_prompts: int = Field(32, ge=1, description="Prompts to evaluate on, from the start.")
    at_start: bool = Field(True, description="Evaluate before the first step.")
    every: int | None = Field(
        None, ge=1, description="Evaluate after every so many steps, while training goes on."
    )
    at_end: bool = Field(True, description="Evaluate after the last step.")
