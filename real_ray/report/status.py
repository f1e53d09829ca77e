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
from real_ray.tracking import lock
from real_ray.tracking.status import Status, read_status

RUNS = Path("runs")  # the default of `run.output_dir`
_SILENT_S, _SILENT_STEPS = 600.0, 10.0  # a run without news for longer is probably dead
_GIVE = "Give the directory of a run, or its name in runs/"


def find_run(name: str) -> tuple[Path, Status]:
    """Return the directory and the status of a run.

    Args:
        name: its directory, or its name in `runs/`.

    Raises:
        UserError: there is no such directory, or none with a status, or the status cannot be read.
    """
    directories = list(dict.fromkeys((Path(name), RUNS / name)))  # one, if it is absolute
    for directory in directories:
        path = directory / "status.json"
        try:
            status = read_status(path)
            return directory.resolve(), status
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read: {error.strerror}. Make it readable, or give the "
                "directory of another run"
            ) from error
    for directory in directories:
        if directory.is_dir():
            raise UserError(
                f"{directory}: no run, or one that had not started: it has no status.json. {_GIVE}"
            )
    runs = [path.parent.name for path in RUNS.glob("*/status.json")]
    raise UserError(
        f"{name}: no such run: no directory {' or '.join(map(str, directories))}"
        f"{did_you_mean(name, runs)}. {_GIVE}"
    )


def facts(directory: Path, status: Status) -> Iterator[str]:
    """Lines on a run: its state, how far it is, its newest checkpoint, and how to go on.

    A run that may be alive is not to be started a second time, so it has no such command.
    """
    age = time.time() - status.time
    is_held = status.state == "running" and lock.is_held(directory / lock.FILE)
    yield f"run {directory.name} in {directory}"
    yield f"  state        {_state(status, age=age, is_held=is_held)}"
    yield f"  step         {status.policy_version} of {status.num_steps}"
    if status.state == "running" and status.generators:
        yield f"  generators   {generators(status)}"
    checkpoint = Path(status.checkpoint) if status.checkpoint else None
    if checkpoint and not checkpoint.is_dir():  # somebody has removed it
        checkpoint = None
    yield f"  checkpoint   {checkpoint or 'none'}"
    may_be_alive = is_held or (is_held is None and not _is_silent(status, age=age))
    if status.state != "finished" and not may_be_alive:
        for name, command in how_to_go_on(directory / "config.yaml", checkpoint).items():
            yield f"  {name:<13}{command}"


def generators(status: Status) -> str:
    """How many can do what, of those that are wanted."""
    there = [f"{n} {what}" for what, n in status.generators.items() if n and what != "wanted"]
    return f"{', '.join(there) or 'none'}; {status.generators['wanted']} wanted"


def ledger(status: Status) -> Table:
    """Groups by where they are or how they ended."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("groups")
    table.add_column(justify="right")
    for name, count in status.groups.items():
        table.add_row(name, str(count), end_section=name == "drawn")
    return table


def _state(status: Status, *, age: float, is_held: bool | None) -> str:
    if status.state != "running":
        return f"{status.state} {_duration(age)} ago" + (
            f": {status.reason}" if status.reason else ""
        )
    step_s, is_silent = status.step_seconds, _is_silent(status, age=age)
    news = f"running, last news {_duration(age)} ago"
    if is_silent:
        usual = f" (the last step took {_duration(step_s)})" if step_s is not None else ""
        news = f"no news for {_duration(age)}{usual}"
    match is_held, is_silent:
        case False, _:
            return f"{news}; no process on this machine holds it: it is gone, or on another machine"
        case None, True:
            return f"{news}: its process has probably been killed"
        case True, True:
            return f"{news}, but a process holds it: wait for that, or stop it"
    return news


def _is_silent(status: Status, *, age: float) -> bool:
    return age >= max(_SILENT_S, _SILENT_STEPS * (status.step_seconds or 0.0))


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
