"""`real-ray simulate`: options, tables, JSON, messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import make_config

from real_ray.cli import main
from real_ray.config import dump_config

TIMES = ("--generate", "4", "--train", "3", "--sync", "2", "--pause", "0")
ONE_GROUP = ("--groups-per-generator", "1")


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(make_config(run={"num_steps": 10})))
    return str(path)


def plans(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["plans"]
    return found


def test_one_plan_is_a_page(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", config_file, *TIMES, "--rollout.max_staleness", "0"]) == 0
    out = capsys.readouterr().out
    for line in (
        "steps       10 in 0.03 virtual hours, 9 s each",
        "throughput  0.326 groups/s, 0.652 completions/s",
        "idle 56.5%, paused for new weights 0.0%; slots in use 43.5%",
        "rewards     workers busy 0.0%",
        "trains 33.3%, waits for groups 44.4%, for weight syncs 22.2%, for evaluations 0.0%",
        "mean 0.00, max 0; share of groups:",
        " 0 100.0% ━━━",
        "0.0 complete groups at the end of a step, at most 0; none after 100% of the steps",
        "groups      drawn 30, trained 30, filtered 0",
        "the pipeline limits: the learner waits for groups 44% of the time",
    ):
        assert line in out
    assert "\x1b" not in out, "colours without a terminal"


def test_several_plans_are_a_table_and_json(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plans.json"
    axes = ["--generators", "1,3", *ONE_GROUP, "--max-staleness", "0, 1"]
    assert main(["simulate", config_file, *TIMES, *axes, "--json", str(file)]) == 0
    found = [
        (plan["num_generators"], plan["max_staleness"], round(plan["seconds_per_step"], 1))
        for plan in plans(file)
    ]
    assert found == [(1, 0, 17.0), (1, 1, 12.5), (3, 0, 9.0), (3, 1, 5.4)]
    assert "generation limits" in plans(file)[1]["limit"]
    assert "training limits" in plans(file)[3]["limit"]
    timings = json.loads(file.read_text())["timings"]
    assert (timings["generate"], timings["groups_per_generator"]) == ("constant:4", 1)
    out = capsys.readouterr().out
    assert [
        line.split()[:3] for line in out.splitlines() if line.split()[:1] in (["1"], ["3"])
    ] == [
        ["1", "0", "17"],
        ["1", "1", "12.5"],
        ["3", "0", "9"],
        ["3", "1", "5.4"],
    ]
    assert "fastest: 3 generators, max_staleness 1. training limits" in out


def test_what_goes_wrong_is_simulated_as_given(config_file: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    chances = ["--failures", "0.125", "--one-sided", "0.25"]
    replaced = ["--rollout.dynamic_sampling", "true", "--json", str(file)]
    assert main(["simulate", config_file, *TIMES, *chances, *replaced]) == 0
    timings = json.loads(file.read_text())["timings"]
    assert (timings["failures"], timings["one_sided"]) == (0.125, 0.25)
    (plan,) = plans(file)
    assert plan["failed_generations"] > 0
    assert plan["ledger"]["filtered"] > 0


def write_run(directory: Path) -> str:
    """All times are 1 s, one group in flight in no sync."""
    names = ("time/generate", "time/score", "time/train", "time/sync", "time/pause")
    row = {**dict.fromkeys(names, 1.0), "async/in_flight_updates": 0}
    (directory / "config.yaml").write_text(dump_config(make_config()))
    (directory / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    return str(directory)


def test_timings_of_a_run_unless_given(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", config_file, "--like", write_run(tmp_path), "--train", "7"]
    assert main([*arguments, "--rollout.max_staleness", "0", "--reward.num_workers", "9"]) == 0
    out = capsys.readouterr().out
    assert "10 s each" in out
    assert "groups at once on a generator 6;" in out, "slots of the run, with max_staleness 1"
    assert main([*arguments, "--pause", "0.5"]) == 0, "the run says how long its syncs are"


def test_pauses_of_a_run_are_no_longer_than_the_syncs_that_are_given(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", config_file, "--like", write_run(tmp_path), "--sync", "0.5"]) == 2
    assert "takes 1 s and that 0.5 s on average" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--generate and --train: give the seconds, as in lognormal:4,0.5, or --like RUN"),
        (["--generate", "4"], "--train: give the seconds"),
        ([*TIMES, "--score", "x"], "--score: 'x' is no distribution of times."),
        ([*TIMES, "--generators", "1,2"], "--generators: give --groups-per-generator too"),
        ([*TIMES, "--max-staleness", "1,2"], "--max-staleness: give --groups-per-generator too"),
        (
            [*TIMES, "--max-staleness", "1,2", "--generators", "1"],
            "--generators and --max-staleness: give --groups-per-generator too",
        ),
        (
            [*TIMES, *ONE_GROUP, "--generators", "1,x"],
            "--generators: 'x' is no whole number (allowed >= 1). Write numbers",
        ),
        (
            [*TIMES, *ONE_GROUP, "--max-staleness", "1,"],
            "--max-staleness: '' is no whole number (allowed >= 0, <= 8). Write numbers",
        ),
        (
            [*TIMES, *ONE_GROUP, "--generators", "1,0"],
            "--generators: is too small (got 0; allowed >= 1)",
        ),
        (
            [*TIMES, *ONE_GROUP, "--max-staleness", "0,9"],
            "--max-staleness: is too large (got 9; allowed >= 0, <= 8)",
        ),
        (
            [*TIMES, *ONE_GROUP, "--rollout.oversample", "2", "--max-staleness", "1,0"],
            "--rollout.oversample: rollout.oversample = 2 keeps groups",
        ),
        (
            ["--generate", "4", "--train", "3", "--pause", "1"],
            "--pause 1: is the first part of a weight sync, which takes 0 s unless --sync",
        ),
        (
            [*TIMES, "--pause", "lognormal:2,0.5"],
            "--pause: is the first part of a weight sync, but takes 2.27 s and that 2 s on average",
        ),
        ([*TIMES, "--json", "/no/such/place"], "--json: /no/such/place cannot be written"),
        ([*TIMES, "--run.num_steps", "null"], "run.num_steps: the config leaves it to its data"),
        (["--like", "/no/run"], "--like: /no/run/metrics.jsonl cannot be read: No such file"),
    ],
)
def test_what_is_no_plan_is_refused(
    config_file: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", config_file, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.out == ""


def test_a_run_that_would_fail_exits_with_1(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("of another plan")
    for file in (old, new):
        failing = ["simulate", config_file, *TIMES, "--failures", "1", "--json", str(file)]
        assert main(failing) == 1
        assert "16 groups in a row failed (run.max_consecutive_failures)" in capsys.readouterr().err
    assert old.read_text() == "of another plan"
    assert not new.exists()


def test_loads_neither_torch_nor_ray(config_file: str) -> None:
    code = (
        "import sys\nfrom real_ray.cli import main\n"
        f"main({['simulate', config_file, *TIMES]})\n"
        "print('loaded:', [n for n in ('torch', 'ray', 'vllm', 'deepspeed') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("loaded: []\n"), done.stderr
