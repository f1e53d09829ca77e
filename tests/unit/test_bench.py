"""The benchmark runs, and its trainers compute the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import build_model

SCRIPT = Path(__file__).parents[2] / "bench" / "learner.py"


def bench(*options: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Numbers of two rounds with a tiny model, and `printed`."""
    directory = tmp_path_factory.mktemp("bench")
    model, numbers = build_model(directory / "model"), directory / "numbers.json"
    printed = bench(
        *("--model", str(model), "--dtype", "float32", "--rounds", "2", "--json", str(numbers)),
        *("--section", "speed", "--section", "two-pass", "--layout", "shared_prefix"),
    )
    return json.loads(numbers.read_text()) | {"printed": printed}


def test_help_names_the_options() -> None:
    text = bench("--help")
    for option in ("--device", "--model", "--dtype", "--rounds", "--json"):
        assert option in text


@pytest.mark.parametrize("shape", ["demo", "long prompt"])
def test_plain_loop_and_learner_compute_the_same(found: dict[str, Any], shape: str) -> None:
    plain, learner = found[f"speed, {shape}"]
    assert (plain["trainer"], learner["trainer"]) == ("plain", "shared_prefix")
    assert len(plain["grad_norms"]) == 2
    assert learner["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-3)
    assert len(learner["times_plain"]) == 2


def test_cut_groups_take_a_second_pass(found: dict[str, Any]) -> None:
    rows = {row["groups"]: row for row in found["two passes"]}
    assert [row["score_passes"] > 0 for row in rows.values()] == [False, True, True]
    assert rows["whole"]["micro-batches"] == 3
    assert rows["cut in two"]["micro-batches"] == 6


def test_tables_are_printed(found: dict[str, Any]) -> None:
    for title in ("Full step, demo", "Parts of a step, long prompt", "Full step by token budget"):
        assert title in found["printed"]
