"""How many steps a run has."""

from __future__ import annotations

import math

from real_ray.config import Config
from real_ray.errors import ConfigError


def with_num_steps(config: Config, *, num_prompts: int) -> Config:
    """Return the config with `run.num_steps` as it follows from the data and `run.num_epochs`.

    Groups that fail or are filtered are replaced by later prompts, so that fewer steps may be left.

    Args:
        num_prompts: training prompts.

    Raises:
        ConfigError: there are too few prompts for one step.
    """
    if config.num_epochs is None:
        return config
    groups_per_step = config.learner.prompts_per_step
    num_groups = num_prompts * config.num_epochs
    if config.data.drop_last and num_groups < groups_per_step:
        raise ConfigError(
            f"data.train has {num_prompts} prompts, in {config.num_epochs} epoch(s) {num_groups} "
            f"groups, and learner.prompts_per_step = {groups_per_step}: with data.drop_last there "
            "is no step. Lower prompts_per_step, raise run.num_epochs, or set data.drop_last: false"
        )
    steps = num_groups / groups_per_step
    available = math.floor(steps) if config.data.drop_last else math.ceil(steps)
    num_steps = min(available, config.run.num_steps or available)
    run = config.run.model_copy(update={"num_steps": num_steps, "num_epochs": config.num_epochs})
    return config.model_copy(update={"run": run})
