"""The benchmark of the driver over Ray actors runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "driver.py"


def test_driver_against_bare_actor_calls(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    options = ("--section", "ray", "--rounds", "1", "--groups", "64", "--prompts-per-step", "16")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "target at least 0.6" in done.stdout
    found = json.loads(file.read_text())
    (row,) = found["over Ray"]
    assert row["driver"] > 0
    assert found["reached"] == pytest.approx(row["driver"] / row["bare_calls"])
