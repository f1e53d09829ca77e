"""RunDirectory: the files of one run."""

from __future__ import annotations

import shutil
from pathlib import Path

from real_ray.config import Config, dump_config
from real_ray.errors import ConfigError


class RunDirectory:
    """`output_dir/name`, created empty, with the resolved config in it.

    Files: `config.yaml`, `metrics.jsonl`, `events.jsonl`, `samples/step_N.jsonl`,
    `reward_curve.png`, `logs/`.

    Raises:
        ConfigError: the place cannot be written, or holds an earlier run and `run.overwrite` is
            not set.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.output_dir).expanduser().resolve() / config.run.name
        if self.metrics.exists() and not config.run.overwrite:
            raise ConfigError(
                f"run.name: {self.path} holds an earlier run. Choose another --run.name, or "
                "replace it with --run.overwrite true"
            )
        try:
            if (self.path / "config.yaml").exists():  # never remove what is not a run
                shutil.rmtree(self.path)
            self.samples.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run.output_dir: cannot write to {self.path}: {error.strerror or error}. "
                "Choose a writable place with --run.output_dir"
            ) from error

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
    def reward_curve(self) -> Path:
        return self.path / "reward_curve.png"
