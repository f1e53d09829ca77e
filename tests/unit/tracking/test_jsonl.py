"""Records as JSON lines: complete at once, valid for every reader, readable for people."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import make_config
from hypothesis import given
from hypothesis import strategies as st

from real_ray.errors import RunError
from real_ray.tracking import RunDirectory
from real_ray.tracking.jsonl import JsonlTracker
from real_ray.types import SampleRecord

SAMPLE = SampleRecord(
    uid="sums:7@0",
    index=0,
    prompt="3+4",
    completion="7",
    answer="7",
    reward=1.0,
    label=1,
    score=0.02,
    weight=-0.4,
    oldest_version=3,
    newest_version=4,
    num_tokens=2,
    finish_reason="stop",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(make_config(run={"output_dir": str(tmp_path), "overwrite": True}))


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory(make_config(run={"output_dir": str(tmp_path_factory.mktemp("runs"))}))


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read(path: Path) -> list[Any]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line, parse_constant=refuse) for line in lines]


def test_an_object_for_each_step(run: RunDirectory) -> None:
    tracker = JsonlTracker(run, samples=True)
    for step in (1, 2):
        tracker.step({"step": step, "reward/mean": step / 4}, ())
        # Read while the tracker is still open: a killed run keeps what it had.
        assert [row["step"] for row in read(run.metrics)] == list(range(1, step + 1))
    first, second = read(run.metrics)
    assert first["reward/mean"] == 0.25
    assert 0 <= first["time/elapsed"] <= second["time/elapsed"] < 60


def test_the_time_of_a_continued_run_goes_on(run: RunDirectory) -> None:
    JsonlTracker(run, samples=True, elapsed_s=1000.0).step({"step": 3}, ())
    assert 1000 <= read(run.metrics)[0]["time/elapsed"] < 1060


def test_samples_have_a_file_for_each_step(run: RunDirectory) -> None:
    tracker = JsonlTracker(run, samples=True)
    other = dataclasses.replace(SAMPLE, index=1, completion="8", label=0, reward=0.0)
    tracker.step({"step": 1}, [SAMPLE, other])
    tracker.step({"step": 12}, [SAMPLE])
    assert sorted(path.name for path in run.samples.iterdir()) == [
        "step_000001.jsonl",
        "step_000012.jsonl",
    ]
    rows = read(run.samples / "step_000001.jsonl")
    assert rows == [dataclasses.asdict(SAMPLE), dataclasses.asdict(other)]


def test_samples_can_be_left_out(run: RunDirectory) -> None:
    JsonlTracker(run, samples=False).step({"step": 1}, [SAMPLE])
    assert list(run.samples.iterdir()) == []
    assert len(read(run.metrics)) == 1


def test_numbers_that_json_lacks_are_null(run: RunDirectory) -> None:
    metrics = {"step": 1, "grad/norm": float("nan"), "real/loss": float("-inf")}
    score = dataclasses.replace(SAMPLE, score=float("inf"))
    JsonlTracker(run, samples=True).step(metrics, [score])
    (row,) = read(run.metrics)
    assert (row["step"], row["grad/norm"], row["real/loss"]) == (1, None, None)
    assert read(run.samples / "step_000001.jsonl")[0]["score"] is None


def test_events_and_evaluations(run: RunDirectory) -> None:
    tracker = JsonlTracker(run, samples=True)
    tracker.event("group failed", "group sums:7@0: NaN")
    tracker.evaluation(3, 0.25, 32)
    tracker.close()
    event, evaluation = read(run.events)
    assert (event["kind"], event["text"]) == ("group failed", "group sums:7@0: NaN")
    assert evaluation["kind"] == "evaluation"
    assert evaluation["text"] == "policy version 3: accuracy 0.250 on 32 prompts"
    assert (evaluation["policy_version"], evaluation["eval/accuracy"]) == (3, 0.25)
    assert 1.6e9 < event["time"] <= evaluation["time"]


@given(text=st.text(st.characters(exclude_categories=()), max_size=20))
def test_any_text_comes_back(shared_run: RunDirectory, text: str) -> None:
    """Half a surrogate pair is in no UTF-8, but a dataset's JSON may hold it."""
    before = len(read(shared_run.events)) if shared_run.events.exists() else 0
    JsonlTracker(shared_run, samples=True).event("text", text)
    rows = read(shared_run.events)
    assert len(rows) == before + 1
    assert rows[-1]["text"].encode("utf-16", "surrogatepass") == text.encode(
        "utf-16", "surrogatepass"
    )


def test_text_stays_readable(run: RunDirectory) -> None:
    JsonlTracker(run, samples=True).event("text", "八 + 九 = 17 ✓")
    assert '"八 + 九 = 17 ✓"' in run.events.read_text(encoding="utf-8")


def test_a_full_disk_is_named(run: RunDirectory) -> None:
    run.metrics.symlink_to("/dev/full")
    with pytest.raises(RunError) as failed:
        JsonlTracker(run, samples=True).step({"step": 1}, ())
    assert str(failed.value) == (
        f"{run.metrics}: cannot be written: No space left on device. Make room there, or choose "
        "another place with --run.output_dir"
    )
