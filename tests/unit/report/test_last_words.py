"""What a run says when it ends: how far it came, where its groups are, and how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import make_config

from real_ray.report import last_words
from real_ray.tracking import RunDirectory
from real_ray.tracking.summary import SummaryTracker

COUNTS = {"drawn": 160, "trained": 148, "filtered": 0, "evicted": 0, "failed": 3}
COUNTS |= {"buffered": 4, "training": 0, "in flight": 5}
LINE = "160 drawn = 148 trained + 3 failed + 4 buffered + 5 in flight"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(make_config(run={"output_dir": str(tmp_path), "name": "r"}))


def summary_of(rewards: list[float], *, step: int = 0) -> SummaryTracker:
    summary = SummaryTracker(step=step)
    for number, reward in enumerate(rewards, step + 1):
        summary.step({"step": number, "reward/mean": reward}, ())
    if rewards:
        summary.ledger(COUNTS, policy_version=step + len(rewards))
    return summary


def facts(text: str) -> dict[str, str]:
    """The lines below the first ones, by name."""
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return {line[2:15].strip(): line[15:] for line in lines}


def test_a_finished_run(run: RunDirectory) -> None:
    summary = summary_of([0.25, 0.25, 0.25, 0.5, 0.75, 0.75, 0.75])
    for version, accuracy in ((0, 0.25), (4, 0.5), (7, 0.875)):
        summary.evaluation(version, accuracy, 32)
    text = last_words.of_a_finished_run(run, summary, model=run.model)
    assert "done: 7 steps, reward 0.25 (first 3 steps) -> 0.75 (last 3)\n" in text
    assert "accuracy on held-out prompts: 25.0% before -> 87.5% after\n" in text
    assert facts(text) == {
        "groups": LINE,
        "metrics": str(run.metrics),
        "samples": str(run.samples),
        "reward curve": str(run.reward_curve),
        "model": str(run.model),
    }


def test_where_the_learners_time_went_shows_what_limits(run: RunDirectory) -> None:
    summary = SummaryTracker()
    for step in (1, 2):
        times = {"step": 10.0, "train": 2.0, "wait": 6.5, "sync": 1.5, "evaluate": 0.0}
        row = {f"time/{name}": seconds for name, seconds in times.items()}
        summary.step({"step": step, "reward/mean": 0.5, **row}, ())
    text = last_words.of_a_finished_run(run, summary, model=None)
    assert facts(text)["learner"] == "trained 20%, waited for groups 65%, synced weights 15%"


def test_a_run_without_a_step_has_last_words_too(run: RunDirectory) -> None:
    """As when every group fails and the data ends."""
    text = last_words.of_a_finished_run(run, summary_of([]), model=None)
    assert text.splitlines()[1] == "done: 0 steps"
    assert facts(text).keys() == {"metrics", "samples"}


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_a_run_with_a_checkpoint_can_be_continued(run: RunDirectory, end: str) -> None:
    text = words(end, run, summary_of([0.5, 0.5], step=30), run.path / "checkpoints/step_000031")
    assert text.splitlines()[0] in (
        "the run failed after step 32 of 57",
        "stopped by SIGTERM after step 32 of 57",
    )
    assert facts(text)["groups"] == LINE
    assert facts(text)["recorded"] == str(run.path)
    assert facts(text)["continue"] == (
        f"real-ray train {run.path}/config.yaml --checkpoint.resume auto"
    )
    assert text.splitlines()[-1] == "resumable from step 31"
    assert "start again" not in text


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_without_one_it_starts_again(run: RunDirectory, end: str) -> None:
    text = words(end, run, summary_of([]), None)
    assert "after step 0 of 57" in text
    assert facts(text)["start again"] == (
        f"real-ray train {run.path}/config.yaml --run.overwrite true"
    )
    assert "groups" not in facts(text)
    assert "continue" not in text
    assert "resumable" not in text


def test_a_failed_run_names_the_logs(run: RunDirectory) -> None:
    assert facts(words("failed", run, summary_of([0.5]), None))["actor logs"] == str(run.logs)


def words(end: str, run: RunDirectory, summary: SummaryTracker, checkpoint: Path | None) -> str:
    if end == "failed":
        return last_words.of_a_failed_run(run, summary, num_steps=57, checkpoint=checkpoint)
    return last_words.of_a_stopped_run(
        run, summary, signal="SIGTERM", num_steps=57, checkpoint=checkpoint
    )
