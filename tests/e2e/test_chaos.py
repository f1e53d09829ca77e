"""A whole run while its processes are killed and stopped: `bench/chaos.py`, for a short time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiny_model import build_model

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"


def test_a_run_survives_kills_and_stops_of_any_of_its_processes(tmp_path: Path) -> None:
    model = build_model(tmp_path / "tiny")
    numbers = tmp_path / "numbers.json"
    # The first four faults meet each kind of process, if none of these is missing just then.
    options = ["--faults", "4", "--every", "4", "--steps", "60", "--seed", "7"]
    done = subprocess.run(
        [sys.executable, CHAOS, "--model", model, "--json", numbers, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    # It checks the steps, the ledger, staleness and the processes itself.
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(numbers.read_text())
    assert found["problems"] == []
    assert sum(row["faults"] for row in found["summary"]) == len(found["faults"]) >= 4
    assert len({row["process"] for row in found["summary"]}) >= 3
    assert sum(row["healed"] for row in found["summary"]) >= 2
    assert "120 drawn = 120 trained" in done.stdout
