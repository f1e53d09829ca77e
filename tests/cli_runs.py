"""Runs started from the command line, as users do, and all of their processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

REAL_RAY = Path(sys.executable).with_name("real-ray")
REWARD = """
import threading
from pathlib import Path

def even_length(completions, **kwargs):
    pipe = Path(__file__).with_name("scoring")
    if pipe.exists():  # whoever reads it knows that this one never ends
        pipe.write_text("here")
        threading.Event().wait()
    return [float(len(text) % 2 == 0) for text in completions]

def fails_in_the_end(completions, *, prompt, answer, columns):
    if int(answer) % 2:
        raise LookupError("no key for this answer")
    return [1.0] * len(completions)
"""


@dataclass
class Run:
    """One run in a working directory of its own, whose processes carry a mark."""

    directory: Path
    temporary: Path  # short, so that the sockets in it are
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, model: Path, **changes: dict[str, object]) -> subprocess.Popen[str]:
        config: dict[str, dict[str, object]] = {
            "run": {"name": "tiny", "num_steps": 3},
            "model": {"name_or_path": str(model)},
            "data": {"train": "arithmetic", "eval": "arithmetic", "max_prompt_length": 100},
            "rollout": {
                "num_generations": 4,
                "max_completion_length": 16,
                "cpus_per_generator": 0.5,
                "cpu_kv_cache_gib": 0.25,
            },
            "reward": {"function": "my_rewards:even_length"},
            "learner": {"prompts_per_step": 2, "cpus_per_rank": 0.5, "learning_rate": 1e-4},
            "eval": {"num_prompts": 4},
            "cluster": {"address": "local"},
        }
        for section, values in changes.items():
            config[section] = {**config.get(section, {}), **values}
        (self.directory / "config.yaml").write_text(yaml.safe_dump(config))
        (self.directory / "my_rewards.py").write_text(REWARD)
        return subprocess.Popen(
            [REAL_RAY, "train", "config.yaml"],
            cwd=self.directory,
            env={
                **os.environ,
                "REAL_RAY_TEST_MARK": self.mark,
                "TMPDIR": str(self.temporary),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on behalf of this run, orphans included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("REAL_RAY_TEST_MARK") == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def left_behind(self, seconds: float = 30.0) -> list[str]:
        """Processes that are still there after a while, which is also what kills them."""
        _, alive = psutil.wait_procs(self.processes(), timeout=seconds)
        names = [" ".join(process.cmdline()[:3]) for process in alive]
        for process in alive:
            process.kill()
        return names

    @property
    def path(self) -> Path:
        """Its run directory."""
        return self.directory / "runs" / "tiny"

    def metrics(self) -> list[dict[str, float]]:
        return read_rows(self.path / "metrics.jsonl")

    def samples(self, step: int) -> list[dict[str, Any]]:
        return read_rows(self.path / "samples" / f"step_{step:06d}.jsonl")

    def command(self, *words: str | Path) -> str:
        """What real-ray prints when it is called with these words."""
        done = subprocess.run(
            [REAL_RAY, *words], cwd=self.directory, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> str:
    """The next line of the output that begins with this."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(pattern, line):
            return line
    pytest.fail(f"the run ended before {pattern}: {process.communicate()[1]}")


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    wait_for_line(process, rf"\s+{step}/\d+ ")
