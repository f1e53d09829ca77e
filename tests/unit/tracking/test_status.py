"""status.json: whole at any time, and true until the next step."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fakes import make_config

from real_ray.errors import RunError, UserError
from real_ray.tracking import RunDirectory
from real_ray.tracking.status import Status, StatusTracker, read_status

COUNTS = {"drawn": 12, "trained": 6, "filtered": 1, "buffered": 2, "in flight": 3}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(make_config(run={"output_dir": str(tmp_path)}))


def start(run: RunDirectory, *, checkpoint: Path | None = None) -> StatusTracker:
    return StatusTracker(run, num_steps=8, policy_version=0, checkpoint=checkpoint)


def test_there_is_a_status_before_the_first_step(run: RunDirectory, tmp_path: Path) -> None:
    before = time.time()
    StatusTracker(run, num_steps=8, policy_version=4, checkpoint=tmp_path / "step_000004")
    status = read_status(run.status)
    assert before <= status.time <= time.time()
    assert status == Status(
        state="running",
        policy_version=4,
        num_steps=8,
        checkpoint=str(tmp_path / "step_000004"),
        time=status.time,
    )


def test_each_step_is_in_it(run: RunDirectory) -> None:
    tracker = start(run)
    tracker.step({"step": 2, "time/step": 1.5}, ())
    tracker.ledger(COUNTS, policy_version=2)
    status = read_status(run.status)
    assert (status.state, status.policy_version, status.step_seconds) == ("running", 2, 1.5)
    assert status.groups == COUNTS
    assert status.checkpoint is None
    assert json.loads(run.status.read_text())["groups"]["in flight"] == 3


def test_a_checkpoint_is_in_it_at_once(run: RunDirectory) -> None:
    tracker = start(run)
    tracker.event("group failed", "elsewhere")
    assert read_status(run.status).checkpoint is None
    tracker.event("checkpoint saved", "/runs/r/checkpoints/step_000002")
    assert read_status(run.status).checkpoint == "/runs/r/checkpoints/step_000002"


def test_the_end_is_in_it(run: RunDirectory) -> None:
    tracker = start(run)
    tracker.ledger(COUNTS, policy_version=2)
    tracker.end("failed", "reward function `f`: NaN")
    status = read_status(run.status)
    assert (status.state, status.reason) == ("failed", "reward function `f`: NaN")
    assert (status.policy_version, status.groups) == (2, COUNTS)


def test_a_full_disk_is_named_and_leaves_the_last_status(run: RunDirectory) -> None:
    tracker = start(run)
    partial = run.status.with_name(".status.json.partial")
    partial.symlink_to("/dev/full")
    with pytest.raises(RunError) as failed:
        tracker.ledger(COUNTS, policy_version=2)
    assert str(failed.value) == (
        f"{run.status}: cannot be written: No space left on device. Make room there, or choose "
        "another place with --run.output_dir"
    )
    assert read_status(run.status).policy_version == 0
    assert not partial.is_symlink()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "asleep"}'])
def test_anything_else_is_refused_by_name(run: RunDirectory, text: str) -> None:
    run.status.write_text(text)
    with pytest.raises(UserError, match=r"status\.json: not the status of a run: "):
        read_status(run.status)
