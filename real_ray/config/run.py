"""Section `run`: name, place and length of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from real_ray.config.base import Place, Section


class RunConfig(Section):
    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="Name of the run; its files are written to `output_dir/name`.",
    )
    output_dir: Place = Field("runs", description="Folder that holds all runs.")
    overwrite: bool = Field(
        False,
        description="Replace an earlier run of the same name instead of refusing it, unless "
        "`checkpoint.resume` continues it.",
    )
    num_steps: int | None = Field(
        None,
        ge=1,
        description="Steps: batches of `learner.prompts_per_step` groups, each one policy version; "
        "null: as many as `num_epochs` gives.",
    )
    num_epochs: int | None = Field(
        None,
        ge=1,
        description="End after so many passes over the training prompts; null: endless with "
        "`num_steps`, else 1.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of data order, sampling and training.")
    max_consecutive_failures: int = Field(
        16,
        ge=1,
        description="Stop when so many groups in a row could not be generated or scored, "
        "or were evicted.",
    )

    stop_grace_s: float = Field(
        60.0,
        ge=0,
        description="After SIGTERM or SIGINT: time for groups under way to finish once the step "
        "under way is done, seconds; the others are sampled again when the run goes on.",
    )
    watchdog_s: float = Field(
        1800.0,
        gt=0,
        description="Tell who waits for whom when nothing at all made progress for so long, "
        "seconds; longer than the slowest step, evaluation or start of an engine.",
    )
    watchdog: Literal["warn", "abort"] = Field(
        "warn",
        description="What follows when `watchdog_s` is over; warn: tell and wait on; abort: tell "
        "and end the run.",
    )

    @property
    def directory(self) -> Path:
        """Where the files of the run are, absolute."""
        return Path(self.output_dir).expanduser().resolve() / self.name

    def checkpoint(self, policy_version: int) -> Path:
        """Where the learner's state of this policy version is saved."""
        return self.directory / "checkpoints" / f"step_{policy_version:06d}"
