"""StatusTracker: where a run is, as one file that is always whole."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from real_ray.errors import RunError, UserError
from real_ray.tracking.base import Tracker
from real_ray.tracking.records import replace_file
from real_ray.tracking.run_dir import RunDirectory
from real_ray.types import SampleRecord

State = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What `status.json` holds."""

    state: State
    reason: str = ""  # of the end: an error message, or a signal
    policy_version: int
    num_steps: int
    groups: Mapping[str, int] = field(default_factory=dict)  # the ledger
    generators: Mapping[str, int] = field(default_factory=dict)  # wanted, and by state
    checkpoint: str | None  # the newest one
    step_seconds: float | None = None  # of the last step
    time: float  # of this record, seconds since 1970


_ADAPTER = TypeAdapter(Status)


class StatusTracker(Tracker):
    """Replaces `status.json` after each step, whenever it changes otherwise, and at the end.

    Args:
        policy_version: that the run begins with.
        checkpoint: that it begins from.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(
        self, run: RunDirectory, *, num_steps: int, policy_version: int, checkpoint: Path | None
    ) -> None:
        self._path = run.status
        self._status = Status(
            state="running",
            policy_version=policy_version,
            num_steps=num_steps,
            checkpoint=None if checkpoint is None else str(checkpoint),
            time=0.0,
        )
        self._write()

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._status = replace(self._status, step_seconds=metrics["time/step"])

    def ledger(self, counts: Mapping[str, int], *, policy_version: int) -> None:
        self._status = replace(self._status, groups=dict(counts), policy_version=policy_version)
        self._write()

    def generators(self, counts: Mapping[str, int]) -> None:
        self._status = replace(self._status, generators=dict(counts))
        self._write()

    def rolled_back(self, step: int) -> None:
        self._status = replace(self._status, policy_version=step)
        self._write()

    def event(self, kind: str, text: str) -> None:
        if kind == "checkpoint saved":
            self._status = replace(self._status, checkpoint=text)
            self._write()

    def end(self, state: State, reason: str = "") -> None:
        """The run has ended."""
        self._status = replace(self._status, state=state, reason=reason)
        self._write()

    def _write(self) -> None:
        self._status = replace(self._status, time=time.time())
        try:
            replace_file(self._path, _ADAPTER.dump_json(self._status, indent=1) + b"\n")
        except OSError as error:
            raise RunError(
                f"{self._path}: cannot be written: {error.strerror}. Make room there, or choose "
                "another place with --run.output_dir"
            ) from error


def read_status(path: Path) -> Status:
    """Read a `status.json`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is something else.
    """
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(
            f"{path}: not the status of a run: {error.errors(include_url=False)[0]['msg']}. A run "
            "writes it anew after each step"
        ) from error
