"""RunDirectory: the files of one run."""

from __future__ import annotations

import shutil
from pathlib import Path

from real_ray.config import Config, dump_config
from real_ray.errors import ConfigError

_OF_A_RUN = {"config.yaml", "logs", "samples"}


class RunDirectory:
    """`output_dir/name`, created empty, with the resolved config in it.

    Files: `config.yaml`, `metrics.jsonl`, `events.jsonl`, `samples/step_N.jsonl`,
    `reward_curve.png`, `logs/`.

    Raises:
        ConfigError: the place cannot be written, holds an earlier run and `run.overwrite` is not
            set, or holds anything else, which is never removed.
    """

    def __init__(self, config: Config) -> None:
        try:
            self.path = config.run.directory
            self._clear(overwrite=config.run.overwrite)
            self.samples.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        except (OSError, RuntimeError) as error:  # RuntimeError: no such home, endless links
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"run.output_dir: cannot write to {config.run.output_dir}/{config.run.name}: "
                f"{reason}. Choose a writable place with --run.output_dir"
            ) from error

    def _clear(self, *, overwrite: bool) -> None:
        """Remove a run that may be replaced: one that recorded no step, or any if asked for."""
        found = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        if not found:
            return
        if not found >= _OF_A_RUN:
            raise ConfigError(
                f"run.name: {self.path} holds files that are no run of real-ray. Choose another "
                "--run.name or --run.output_dir"
            )
        if self.metrics.exists() and not overwrite:
            raise ConfigError(
                f"run.name: {self.path} holds an earlier run. Choose another --run.name, or "
                "replace it with --run.overwrite true"
            )
        shutil.rmtree(self.path)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def reward_curve(self) -> Path:
        return self.path / "reward_curve.png"
