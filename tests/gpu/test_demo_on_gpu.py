"""The demo's job with CUDA engines and NCCL weight transfer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: one generator, one learner rank"
)
def test_the_demo_runs_on_gpus(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            Path(sys.executable).with_name("real-ray"),
            "demo",
            *("--run.num_steps", "3", "--cluster.device", "cuda", "--sync.backend", "nccl"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["sync/probe_difference"] for line in lines) < 0.05
