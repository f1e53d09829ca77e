"""What `real-ray status` shows of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from real_ray.errors import UserError
from real_ray.nearest import did_you_mean
from real_ray.report.last_words import how_to_go_on
from real_ray.tracking.status import Status, read_status

RUNS = Path("runs")  # the default of `run.output_dir`
_SILENT_S, _SILENT_STEPS = 600.0, 10.0  # a run without news for longer is probably dead


def find_run(name: str) -> tuple[Path, Status]:
    """Return the directory and the status of a run.

    Args:
        name: its directory, or its name in `runs/`.

    Raises:
        UserError: there is no such run, or it has no readable status.
    """
    for directory in (Path(name), RUNS / name):
        try:
            return directory.resolve(), read_status(directory / "status.json")
        except OSError:
            continue
    runs = [path.name for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
    raise UserError(
        f"{name}: no run: neither {Path(name) / 'status.json'} nor "
        f"{RUNS / name / 'status.json'} is there{did_you_mean(name, runs)}. Give the directory of "
        "a run, or its name in runs/"
    )


def facts(directory: Path, status: Status) -> Iterator[str]:
    """Lines on a run: its state, how far it is, its newest checkpoint, and how to go on."""
    yield f"run {directory.name} in {directory}"
    yield f"  state        {_state(status, age=time.time() - status.time)}"
    yield f"  step         {status.policy_version} of {status.num_steps}"
    checkpoint = Path(status.checkpoint) if status.checkpoint else None
    if checkpoint and not checkpoint.is_dir():  # somebody has removed it
        checkpoint = None
    yield f"  checkpoint   {checkpoint or 'none'}"
    if status.state != "finished":
        for name, command in how_to_go_on(directory / "config.yaml", checkpoint).items():
            yield f"  {name:<13}{command}"


def ledger(status: Status) -> Table:
    """Groups by where they are or how they ended."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("groups")
    table.add_column(justify="right")
    for name, count in status.groups.items():
        table.add_row(name, str(count), end_section=name == "drawn")
    return table


def _state(status: Status, *, age: float) -> str:
    if status.state != "running":
        return f"{status.state} {_duration(age)} ago" + (
            f": {status.reason}" if status.reason else ""
        )
    step_s = status.step_seconds
    if age < max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0)):
        return f"running, last news {_duration(age)} ago"
    usual = f" (the last step took {_duration(step_s)})" if step_s is not None else ""
    return f"no news for {_duration(age)}{usual}: its process has probably been killed"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
