"""The benchmarks of the driver, the simulator and the demo's job run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import make_config

from real_ray.config import dump_config

BENCH = Path(__file__).parents[2] / "bench"


def bench(script: str, *options: object) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("overlap.py", ("--seconds", "--steps", "--groups", "--json")),
        ("driver.py", ("--rounds", "--groups", "--memory-groups", "--section", "--json")),
        ("simulate.py", ("--run", "--steps", "--max-staleness", "--json")),
    ],
)
def test_help_names_the_options(script: str, options: tuple[str, ...]) -> None:
    text = bench(script, "--help")
    assert [option for option in options if option not in text] == []


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("driver.py", "--rounds 0", "argument --rounds: 0 is below 1"),
        ("driver.py", "--groups 10", "--groups 10 and --memory-groups 100000 must be at least"),
        ("driver.py", "--memory-groups 63", "must be at least --prompts-per-step 64: a step takes"),
        ("overlap.py", "--groups 3", "argument --groups: 3 is odd"),
        ("overlap.py", "--groups 0", "argument --groups: 0 is below 2"),
        ("overlap.py", "--seconds nan", "argument --seconds: nan is not a time above 0"),
        ("simulate.py", "--run /no/run", "/no/run holds no run: /no/run/metrics.jsonl is not the"),
        ("learner.py", "--scale 0", "argument --scale: 0 is below 1"),
        ("async_vs_sync.py", "--steps 3", "argument --steps: 3 is below 4"),
        ("demo_job.py", "--steps 3", "argument --steps: 3 is below 4"),
        ("demo_job.py", "-- --loss.tau 0", "--loss.tau"),
        ("demo_job.py", "-- --tau 1", "--tau: unknown flag"),
    ],
)
def test_bad_options_are_refused(script: str, options: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *options.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_overlap_in_virtual_time_is_ideal(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    printed = bench("overlap.py", "--seconds", 0.02, "--steps", 4, "--json", file)
    rows = numbers(file)["overlap"]
    assert len(rows) == 6
    for row in rows:
        assert row["virtual_synchronous/sum"] == pytest.approx(1)
        assert row["virtual_asynchronous/ideal"] == pytest.approx(1)
    assert "target at most 1.03" in printed


def test_driver_in_process(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    options = ("--rounds", 2, "--groups", 64, "--memory-groups", 80, "--prompts-per-step", 8)
    bench("driver.py", *options, "--section", "process", "--section", "memory", "--json", file)
    found = numbers(file)
    (rates,) = found["in process"]
    assert len(rates["rounds"]) == 2
    assert rates["median"] > 0
    resident, allocated = found["memory"]
    assert {"8", "40", "80"} < resident.keys() == allocated.keys()


def test_a_run_that_is_done_is_compared_with_its_simulation(tmp_path: Path) -> None:
    config = make_config(rollout={"max_staleness": 0}, reward={"num_workers": 9})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    row = {
        "time/generate": 4.0,
        "time/score": 1.0,
        "time/train": 3.0,
        "time/sync": 2.0,
        "time/pause": 1.0,
        "time/wait": 5.0,
        "time/step": 10.0,
        "async/in_flight_updates": 0,
        "async/staleness_mean": 0.0,
    }
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    file = tmp_path / "numbers.json"
    printed = bench("simulate.py", "--run", tmp_path, "--json", file)
    (found,) = numbers(file)["simulation"]
    assert (found["measured"], found["simulated"]) == (10.0, pytest.approx(10))
    assert found["waits_for_groups,_simulated"] == pytest.approx(0.5)
    assert "deviation: worst 0.0%, target at most 10%" in printed
