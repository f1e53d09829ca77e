"""WandbTracker: metrics in Weights & Biases. `offline` needs no account and no network."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_ray.config import Config
from real_ray.errors import ConfigError
from real_ray.tracking.base import Tracker
from real_ray.tracking.records import replace_file
from real_ray.tracking.run_dir import RunDirectory
from real_ray.types import SampleRecord


class WandbTracker(Tracker):
    """One wandb run beside the run directory. A run that is continued goes on in the same one.

    The x-axis is our `step` and not wandb's own, which only ever rises: a continued run makes
    steps again that were logged before it was killed.

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
                id=_id(run.path / "wandb" / "id"),
                resume="allow",
                dir=run.path,
                mode=mode,
                config=config.model_dump(mode="json"),
                allow_val_change=True,  # as of run.num_steps
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracking.wandb = {mode}: wandb does not start: {error}. Log in with "
                "`wandb login`, or use --tracking.wandb offline"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._run.log(dict(metrics))

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self._run.log(
            {
                "step": policy_version,
                "eval/accuracy": accuracy,
                "eval/policy_version": policy_version,
            }
        )

    def close(self) -> None:
        self._run.finish()


def _id(file: Path) -> str:
    """The name of the run in wandb, made when it is first asked for."""
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        replace_file(file, uuid.uuid4().hex[:8].encode())
    return file.read_text()
