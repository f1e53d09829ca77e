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
    axes = ["--generators", "1,3", "--groups-per-generator", "1", "--max-staleness", "0, 1"]
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


def test_timings_of_a_run_unless_given(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("time/generate", "time/score", "time/train", "time/sync", "time/pause")
    row = {**dict.fromkeys(names, 1.0), "async/in_flight_updates": 0}
    (tmp_path / "config.yaml").write_text(dump_config(make_config()))
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    arguments = ["simulate", config_file, "--like", str(tmp_path), "--train", "7"]
    assert main([*arguments, "--rollout.max_staleness", "0", "--reward.num_workers", "9"]) == 0
    assert "10 s each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--generate and --train: give the seconds, as in lognormal:4,0.5, or --like RUN"),
        (["--generate", "4"], "--train: give the seconds"),
        ([*TIMES, "--score", "x"], "--score: 'x' is no distribution of times."),
        ([*TIMES, "--generators", "1,2"], "--generators compares numbers of generators: give --g"),
        (
            [*TIMES, "--generators", "1,", "--groups-per-generator", "2"],
            "--rollout.num_generators: ",
        ),
        ([*TIMES, "--max-staleness", "0,9"], "--rollout.max_staleness: "),
        ([*TIMES, "--json", "/no/such/place"], "--json: /no/such/place cannot be written"),
        ([*TIMES, "--run.num_steps", "null"], "run.num_steps: the config leaves it to its data"),
        (["--like", "/no/run"], "--like: /no/run/metrics.jsonl does not exist."),
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
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", config_file, *TIMES, "--failures", "1"]) == 1
    assert "16 groups in a row failed (run.max_consecutive_failures)" in capsys.readouterr().err


def test_loads_neither_torch_nor_ray(config_file: str) -> None:
    code = (
        "import sys\nfrom real_ray.cli import main\n"
        f"main({['simulate', config_file, *TIMES]})\n"
        "print('loaded:', [n for n in ('torch', 'ray', 'vllm', 'deepspeed') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("loaded: []\n"), done.stderr
