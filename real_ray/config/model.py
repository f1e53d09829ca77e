"""Section `model`: the policy that is trained."""

from __future__ import annotations

from pydantic import Field

from real_ray.config.base import Place, Section


class ModelConfig(Section):
    name_or_path: Place = Field(
        description="Hugging Face directory on this machine, or a model name on the hub.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that the model repository ships. Only if you trust it."
    )
