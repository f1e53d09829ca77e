"""RunDirectory: the files of one run."""

from __future__ import annotations

import shutil
from pathlib import Path

from real_ray.config import Config, dump_config
from real_ray.errors import ConfigError
from real_ray.tracking.lock import RunLock
from real_ray.tracking.records import EarlierRecords, replace_file, roll_back

_OF_A_RUN = {"config.yaml", "logs", "samples"}
_LOCK = ".lock"


class RunDirectory:
    """`output_dir/name` with the config in it: created empty, or as an earlier run left it.

    Files: `config.yaml`, `metrics.jsonl`, `events.jsonl`, `status.json`, `samples/step_N.jsonl`,
    `checkpoints/step_N/`, `reward_curve.png`, `logs/`. Closed at the end of the run.

    Args:
        continued_after: step that the run in this directory is continued after; what it recorded
            of later steps is removed. None: a new run.

    Raises:
        ConfigError: the place cannot be written, another process uses it, or a new run finds an
            earlier one and `run.overwrite` is not set, or anything else, which is never removed.
    """

    def __init__(self, config: Config, *, continued_after: int | None = None) -> None:
        self.earlier = EarlierRecords()
        try:
            self.path = config.run.directory
            if continued_after is None:
                self._check_content()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path / _LOCK)
            if continued_after is None:
                self._clear(config)
            else:
                self.earlier = roll_back(self.path, step=continued_after)
            self.samples.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            replace_file(self.config, dump_config(config).encode())
        except (OSError, RuntimeError) as error:  # RuntimeError: no such home, endless links
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"run.output_dir: cannot write to {config.run.output_dir}/{config.run.name}: "
                f"{reason}. Choose a writable place with --run.output_dir"
            ) from error

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.release()

    def _check_content(self) -> None:
        """Refuse a directory with anything in it that is no run."""
        entries = self.path.iterdir() if self.path.exists() else ()
        found = {entry.name for entry in entries} - {_LOCK}
        if found and not found >= _OF_A_RUN:
            raise ConfigError(
                f"run.name: {self.path} holds files that are no run of real-ray. Choose another "
                "--run.name or --run.output_dir"
            )

    def _clear(self, config: Config) -> None:
        """Remove a run that may be replaced: one that recorded no step, or any if asked for."""
        if self.metrics.exists() and not config.run.overwrite:
            resumes = config.checkpoint.resume == "auto"
            raise ConfigError(
                f"run.name: {self.path} holds an earlier run"
                + (" without a checkpoint to continue it from" if resumes else "")
                + ". Choose another --run.name, "
                + ("" if resumes else "continue that one with --checkpoint.resume auto, ")
                + "or replace it with --run.overwrite true"
            )
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

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
