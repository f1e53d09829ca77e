"""Runs of the demo's job in a process of their own, and what they took."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

WARM = 3  # steps that are left out: they fill the pipeline, and fetch code and memory

Metrics = dict[str, float]
_ROLES = {"ray::LearnerActor": "learner", "ray::GeneratorActor": "generator", "VLLM": "generator"}
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Steps of a finished run, in order, and CPU seconds of each role in a warm step."""

    steps: list[Metrics]
    cpu_seconds: dict[str, float]

    def warm(self, name: str) -> list[float]:
        """A metric of the steps after the first `WARM` ones."""
        return [step[name] for step in self.steps[WARM:]]


def run_demo(
    flags: Sequence[str], *, num_steps: int, look: Callable[[psutil.Process], None] | None = None
) -> Job:
    """`real-ray demo` with some flags more, to its end.

    Args:
        look: called with the process several times a second.
    """
    with tempfile.TemporaryDirectory() as directory:
        metrics, log = Path(directory) / "job" / "metrics.jsonl", Path(directory) / "log"
        command = [
            *(str(Path(sys.executable).with_name("real-ray")), "demo", *flags),
            *("--run.output_dir", directory, "--run.name", "job"),
            *("--run.num_steps", str(num_steps)),
        ]
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            seen: list[tuple[int, dict[str, float]]] = []  # steps done, CPU seconds by then
            root = psutil.Process(process.pid)
            while process.poll() is None:
                steps = metrics.read_text().count("\n") if metrics.exists() else 0
                if look is not None:
                    look(root)
                if steps >= WARM and (not seen or steps > seen[-1][0]):
                    seen.append((steps, _cpu_seconds(root)))
                time.sleep(_POLL_SECONDS)
            if process.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text()}")
        lines = metrics.read_text().splitlines()
    (first, before), (last, after) = seen[0], seen[-1]
    return Job(
        steps=[json.loads(line) for line in lines],
        cpu_seconds={
            role: (after[role] - before.get(role, 0.0)) / max(1, last - first) for role in after
        },
    )


def role_of(process: psutil.Process) -> str:
    """`learner`, `generator`, or `rest`."""
    name = " ".join(process.cmdline())
    return next((role for start, role in _ROLES.items() if name.startswith(start)), "rest")


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def _cpu_seconds(root: psutil.Process) -> dict[str, float]:
    found = dict.fromkeys(("learner", "generator", "rest"), 0.0)
    for process in tree(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[role_of(process)] += times.user + times.system
    return found


def run_plain(flags: Sequence[str], *, num_steps: int, env: dict[str, str]) -> list[Metrics]:
    """Steps of plain_job.py, with the flags of `run_demo`."""
    script = Path(__file__).with_name("plain_job.py")
    done = subprocess.run(
        [sys.executable, str(script), *flags, "--run.num_steps", str(num_steps)],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
