"""The demo's job on the real 135M model: it learns, and every sync arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

REAL_RAY = Path(sys.executable).with_name("real-ray")


def test_the_demo_learns_to_add(tmp_path: Path) -> None:
    result = subprocess.run(
        [REAL_RAY, "demo", "--run.num_steps", "15", "--checkpoint.save_final", "false"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    path = tmp_path / "runs" / "demo"
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert len(rewards) == 15
    assert fmean(rewards[-5:]) >= fmean(rewards[:3]) + 0.25, rewards
    assert max(row["async/staleness_max"] for row in rows) == 1
    # bfloat16 on both sides; without a sync the policy moves away by much more than this.
    assert max(row["sync/probe_difference"] for row in rows) < 0.05
    before, after = (
        event["eval/accuracy"]
        for event in map(json.loads, (path / "events.jsonl").read_text().splitlines())
        if event["kind"] == "evaluation"
    )
    assert after >= before + 0.2
    assert "try next" in result.stdout
