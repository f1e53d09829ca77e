"""RunDirectory: the files of one run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from real_ray.config import Config, dump_config
from real_ray.errors import ConfigError
from real_ray.tracking import lock, scaling
from real_ray.tracking.records import EarlierRecords, replace_file, roll_back

_OF_A_RUN = {"config.yaml", "logs", "samples"}
_MADE_BY_STEPS = {"metrics.jsonl", "checkpoints", "model"}


def check_may_begin(config: Config) -> None:
    """Check that a new run may take its directory: that it is empty, or holds a run which has
    nothing to lose or is to be replaced.

    Raises:
        ConfigError: `run.overwrite` is not set for an earlier run, or anything else is in there,
            which is never removed.
    """
    with _place_named(config):
        path = config.run.directory
        there = next(place for place in (path, *path.parents) if place.exists())
        if not os.access(there, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        found = {entry.name for entry in path.iterdir()} - {lock.FILE} if there == path else set()
    if found and not found >= _OF_A_RUN:
        raise ConfigError(
            f"run.name: {path} holds files that are no run of real-ray. Choose another "
            "--run.name or --run.output_dir"
        )
    if found & _MADE_BY_STEPS and not config.run.overwrite:
        resumes = config.checkpoint.resume == "auto"
        raise ConfigError(
            f"run.name: {path} holds an earlier run"
            + (" without a checkpoint to continue it from" if resumes else "")
            + ". Choose another --run.name, "
            + ("" if resumes else "continue that one with --checkpoint.resume auto, ")
            + "or replace it with --run.overwrite true"
        )


def _found_from_anywhere(config: Config) -> Config:
    """So that `config.yaml` continues the run whatever the current directory is."""
    here = str(config.run.directory.parent)
    return config.model_copy(update={"run": config.run.model_copy(update={"output_dir": here})})


@contextlib.contextmanager
def _place_named(config: Config) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: endless links
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"run.output_dir: cannot write to {config.run.output_dir}/{config.run.name}: "
            f"{reason}. Choose a writable place with --run.output_dir"
        ) from error


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
        with _place_named(config):
            self.path = config.run.directory
            if continued_after is None:
                check_may_begin(config)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock.RunLock(self.path / lock.FILE)
            if continued_after is None:
                self._clear()
            else:
                self.earlier = roll_back(self.path, step=continued_after)
            (self.path / scaling.FILE).unlink(missing_ok=True)  # asked of a run that has ended
            self.samples.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            replace_file(self.config, dump_config(_found_from_anywhere(config)).encode())

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.release()

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != lock.FILE:
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
