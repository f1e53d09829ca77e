"""What `real-ray status` says of runs that are alive, ended, or were killed."""

from __future__ import annotations

import errno
import fcntl
import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import make_config
from rich.console import Console

from real_ray.report.status import facts, ledger
from real_ray.tracking import RunDirectory, lock
from real_ray.tracking.status import Status

RUN = Path("/runs/sums")
STATUS = Status(
    state="running",
    policy_version=12,
    num_steps=57,
    groups={"drawn": 60, "trained": 48, "failed": 0, "in flight": 12},
    checkpoint=None,
    step_seconds=40.0,
    time=0.0,
)
AGAIN = "real-ray train /runs/sums/config.yaml --run.overwrite true"


def shown(status: Status, *, age: float, is_held: bool | None = None) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "is_held", lambda path: is_held)
        first, *lines = facts(RUN, replace(status, time=time.time() - age))
    assert first == "run sums in /runs/sums"
    return {line[2:15].strip(): line[15:] for line in lines}


@pytest.mark.parametrize("is_held", [True, None])
def test_a_run_that_is_alive_is_not_to_be_started_again(is_held: bool | None) -> None:
    assert shown(STATUS, age=12, is_held=is_held) == {
        "state": "running, last news 12 s ago",
        "step": "12 of 57",
        "checkpoint": "none",
    }


@pytest.mark.parametrize(
    ("age", "step_seconds", "state"),
    [
        (599, 1.0, "running, last news 10.0 min ago"),
        (3700, 400.0, "running, last news 61.7 min ago"),
        (4100, 400.0, "no news for 68.3 min (the last step took 6.7 min): its process has probab"),
        (3.5 * 86400, 40.0, "no news for 3.5 days (the last step took 40 s): its process has"),
        (7200, None, "no news for 2.0 h: its process has probably been killed"),
    ],
)
def test_silence_is_told(age: float, step_seconds: float | None, state: str) -> None:
    lines = shown(replace(STATUS, step_seconds=step_seconds), age=age)
    assert lines["state"].startswith(state)
    assert lines.get("start again") == (AGAIN if state.startswith("no news") else None)


def test_a_silent_process_is_to_be_stopped_first() -> None:
    lines = shown(STATUS, age=7200, is_held=True)
    assert lines["state"] == (
        "no news for 2.0 h (the last step took 40 s), but a process holds it: wait for that, or "
        "stop it"
    )
    assert "start again" not in lines


@pytest.mark.parametrize(
    ("age", "news"),
    [
        (12, "running, last news 12 s ago"),
        (7200, "no news for 2.0 h (the last step took 40 s)"),
    ],
)
def test_a_run_without_a_process_can_be_started_again(age: float, news: str) -> None:
    lines = shown(STATUS, age=age, is_held=False)
    assert lines["state"] == (
        f"{news}; no process on this machine holds it: it is gone, or on another machine"
    )
    assert lines["start again"] == AGAIN


def test_whether_a_process_holds_a_run(tmp_path: Path) -> None:
    def has_command() -> bool:
        return any("start again" in line for line in facts(run.path, recent))

    recent = replace(STATUS, time=time.time())
    run = RunDirectory(make_config(run={"output_dir": str(tmp_path)}))
    assert not has_command()
    run.close()
    assert has_command()
    (run.path / ".lock").unlink()
    assert has_command()
    assert not (run.path / ".lock").exists()


def test_a_file_system_without_locks_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".lock").touch()
    assert lock.is_held(tmp_path / ".lock") is False
    monkeypatch.setattr(fcntl, "flock", flock)
    assert lock.is_held(tmp_path / ".lock") is None


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("finished", "", "finished 2.5 h ago"),
        ("failed", "reward function `f`: NaN", "failed 2.5 h ago: reward function `f`: NaN"),
        ("stopped", "SIGTERM", "stopped 2.5 h ago: SIGTERM"),
    ],
)
def test_an_end_is_told(state: str, reason: str, text: str) -> None:
    status = replace(STATUS, state=state, reason=reason)  # type: ignore[arg-type]
    lines = shown(status, age=9000)
    assert lines["state"] == text
    assert ("start again" in lines) is (state != "finished")


def test_a_checkpoint_that_is_there_can_be_continued(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_000010"
    status = replace(STATUS, checkpoint=str(checkpoint))
    assert shown(status, age=1)["checkpoint"] == "none", "somebody has removed it"
    checkpoint.mkdir()
    lines = shown(status, age=1, is_held=False)
    assert lines["checkpoint"] == str(checkpoint)
    assert lines["continue"] == ("real-ray train /runs/sums/config.yaml --checkpoint.resume auto")


def test_the_ledger_is_a_table() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(ledger(STATUS))
    rows = [line.split() for line in out.getvalue().splitlines()]
    for row in (["drawn", "60"], ["trained", "48"], ["failed", "0"], ["in", "flight", "12"]):
        assert row in rows
