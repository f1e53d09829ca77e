"""WandbTracker: metrics in Weights & Biases. `offline` needs no account and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from real_ray.config import Config
from real_ray.errors import ConfigError
from real_ray.tracking.base import Tracker
from real_ray.tracking.run_dir import RunDirectory
from real_ray.types import SampleRecord


class WandbTracker(Tracker):
    """One wandb run beside the run directory.

    Raises:
        ConfigError: wandb refuses to start, for example without credentials when `online`.
    """

    def __init__(self, config: Config, run: RunDirectory) -> None:
        import wandb

        mode = config.tracking.wandb
        assert mode != "disabled"
        try:
            self._run: Any = wandb.init(
                project=config.tracking.wandb_project,
                name=config.run.name,
                dir=run.path,
                mode=mode,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracking.wandb = {mode}: wandb does not start: {error}. Log in with "
                "`wandb login`, or use --tracking.wandb offline"
            ) from error

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._run.log(dict(metrics), step=int(metrics["step"]))

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self._run.log({"eval/accuracy": accuracy, "eval/policy_version": policy_version})

    def close(self) -> None:
        self._run.finish()
