"""`real-ray scale`: what it says where nobody can scale."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import make_config
from pydantic import TypeAdapter

from real_ray.errors import ConfigError, UserError
from real_ray.report.scale import scale_run
from real_ray.tracking import RunDirectory
from real_ray.tracking.records import replace_file
from real_ray.tracking.scaling import newest_request
from real_ray.tracking.status import Status

RUNNING = Status(
    state="running",
    policy_version=3,
    num_steps=9,
    generators={"wanted": 1, "starting": 0, "ready": 1},
    checkpoint=None,
    time=0.0,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = make_config(
        run={"output_dir": str(tmp_path)}, rollout={"min_generators": 1, "max_generators": 3}
    )
    run = RunDirectory(config)
    write(run, RUNNING)
    return run


def write(run: RunDirectory, status: Status) -> None:
    replace_file(run.status, TypeAdapter(Status).dump_json(status))


def test_a_run_that_hears_of_it_answers(run: RunDirectory) -> None:
    def answer() -> None:
        while newest_request(run.path) is None:
            pass
        heard = {"wanted": 3, "starting": 2, "ready": 1}
        write(run, replace(RUNNING, generators=heard, time=time.time()))

    hearing = threading.Thread(target=answer)
    hearing.start()
    text = scale_run(str(run.path), 3)
    hearing.join()
    assert text == (f"run run: 2 starting, 1 ready; 3 wanted. See `real-ray status {run.path}`")


def test_a_run_that_does_not_answer_is_told(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("real_ray.report.scale._ANSWER_S", 0.0)
    assert "has not heard of it" in scale_run(str(run.path), 2)
    request = newest_request(run.path)
    assert request is not None
    assert request.num_generators == 2


def test_numbers_that_the_run_does_not_allow_are_refused(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="to 4 generators: the run allows 1 to 3"):
        scale_run(str(run.path), 4)
    assert newest_request(run.path) is None


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_a_run_that_has_ended_cannot_be_scaled(run: RunDirectory, state: str) -> None:
    write(run, replace(RUNNING, state=state))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"the run has {state}, so there is nothing to scale"):
        scale_run(str(run.path), 2)


def test_a_request_to_an_earlier_run_is_not_for_the_next_one(run: RunDirectory) -> None:
    from real_ray.tracking.scaling import ask_for

    ask_for(run.path, 3)
    run.close()
    again = RunDirectory(make_config(run={"output_dir": str(run.path.parent)}), continued_after=0)
    assert newest_request(again.path) is None
