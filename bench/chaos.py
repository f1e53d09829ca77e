"""A run whose processes are killed and stopped at random while it trains; see bench/README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import yaml
from arguments import at_least, seconds
from report import Report
from rich.console import Console

KINDS = {  # by the start of the command line: what it is, and the part of the run it belongs to
    "ray::GeneratorActor": ("generator actor", "generator"),
    "VLLM::EngineCore": ("engine", "generator"),
    "ray::LearnerActor": ("learner rank", "learner"),
    "ray::RewardActor": ("reward worker", "reward worker"),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_MARK = "REAL_RAY_CHAOS"
_MAX_STALENESS = 1
_GONE_S = 60.0  # for the processes of a run that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A signal to a process."""

    time: float  # seconds since 1970
    process: str
    part: str
    signal: str


def main() -> None:
    options = _parse()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as directory:
        with _started(Path(directory), options) as process:
            run = Path(directory) / "runs" / "chaos"
            faults = list(_faults(process, run, options))
            try:
                code = process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                code = None
        left = _left_behind()
        report = _summary(faults, _rows(run / "events.jsonl"))
        problems = _problems(run, code=code, left=left, options=options)
        console = Console(width=None if Console().is_terminal else 120)
        console.print(report.table())
        console.print(*_last_lines(Path(directory)), sep="\n", markup=False)
        if options.json:
            faults_as_rows = [
                {"time": f.time, "process": f.process, "part": f.part, "signal": f.signal}
                for f in faults
            ]
            options.json.write_text(
                json.dumps(
                    {"summary": report.rows, "faults": faults_as_rows, "problems": problems},
                    indent=1,
                )
            )
        if options.keep:
            subprocess.run(["cp", "-r", str(run), str(options.keep)], check=True)
    if problems:
        sys.exit("\n".join(problems))


def half(completions: list[str], **_: object) -> list[float]:
    """A reward function: half of each group is right, so that every group is trained on."""
    return [float(index % 2) for index in range(len(completions))]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the demo's model")
    parser.add_argument("--faults", type=at_least(1), default=40, metavar="N")
    parser.add_argument(
        "--every", type=seconds, default=12.0, metavar="SECONDS", help="mean time between faults"
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=200, metavar="N", help="that the run has"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the schedule of faults")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=1800.0,
        metavar="SECONDS",
        help="for the run to end, after the last fault",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the run directory there")
    return parser.parse_args()


@contextmanager
def _started(directory: Path, options: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """The run; whatever happens, it has ended afterwards."""
    model = options.model
    if model is None:
        from real_ray.demo_model import obtain

        model = obtain()
    (directory / "config.yaml").write_text(yaml.safe_dump(_config(model, options)))
    env = {**os.environ, _MARK: str(os.getpid()), "TMPDIR": str(directory)}
    env["PYTHONPATH"] = str(Path(__file__).parent)  # of the reward function
    real_ray = str(Path(sys.executable).with_name("real-ray"))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [real_ray, "train", "config.yaml"],
            cwd=directory,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _config(model: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    cores = max(1, (os.cpu_count() or 2) // 2)
    return {
        "run": {"name": "chaos", "num_steps": options.steps, "max_consecutive_failures": 100},
        "model": {"name_or_path": str(model)},
        "data": {"train": "arithmetic", "max_prompt_length": 100},
        "rollout": {
            "num_generations": 4,
            "max_completion_length": 48,
            "max_staleness": _MAX_STALENESS,
            "num_generators": 2,
            "cpus_per_generator": 0.3,
            "cpu_kv_cache_gib": 0.25,
            "num_threads": cores,
            "stall_s": 10.0,
            "max_restarts": 1000,
            "max_retries": 20,
        },
        "reward": {
            "function": "chaos:half",
            "num_workers": 2,
            "cpus_per_worker": 0.1,
            "timeout_s": 10.0,
            "max_retries": 20,
        },
        "learner": {
            "num_ranks": 2,
            "cpus_per_rank": 0.3,
            "num_threads": cores,
            "prompts_per_step": 2,
            "learning_rate": 1e-5,
            "timeout_s": 30.0,
            "max_restarts": 1000,
        },
        "sync": {"timeout_s": 10.0},
        "checkpoint": {"save_steps": 5, "save_final": False},
        "eval": {"at_start": False, "at_end": False},
        "cluster": {"address": "local", "start_timeout_s": 60.0},
    }


def _faults(
    process: subprocess.Popen[bytes], run: Path, options: argparse.Namespace
) -> Iterator[Fault]:
    """Make them, until there were enough or the run has ended."""
    draw = random.Random(options.seed)
    ended = threading.Event()
    threading.Thread(target=lambda: (process.wait(), ended.set()), daemon=True).start()
    began = time.monotonic()
    while not (run / "metrics.jsonl").exists():  # the first step
        if ended.wait(0.2) or time.monotonic() - began > options.timeout:
            return
    kinds: list[str] = []
    for _ in range(options.faults):
        if ended.wait(draw.uniform(0.5, 1.5) * options.every):
            return
        if not kinds:  # all kinds in turn, in any order
            kinds = draw.sample(sorted(KINDS), len(KINDS))
        kind = kinds.pop()
        name = draw.choice(sorted(SIGNALS))
        living = sorted(_processes(kind), key=lambda p: p.pid)
        if not living:  # it is being replaced
            kind, living = next(((k, p) for k in sorted(KINDS) if (p := _processes(k))), ("", []))
        if living:
            victim = draw.choice(living)
            at = time.time()
            victim.send_signal(SIGNALS[name])
            what, part = KINDS[kind]
            yield Fault(time=at, process=what, part=part, signal=name)


def _processes(kind: str) -> list[psutil.Process]:
    found = []
    for process in _marked():
        try:
            can_be_hit = process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
            if can_be_hit and " ".join(process.cmdline()).startswith(kind):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _marked() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == str(os.getpid()):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _left_behind() -> list[str]:
    _, alive = psutil.wait_procs(list(_marked()), timeout=_GONE_S)
    names = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline()[:3]))
            process.kill()
    return names


def _summary(faults: list[Fault], events: list[dict[str, Any]]) -> Report:
    """Faults of each kind, how many of them were noticed and healed, and how long that took."""
    healings = [_healed_at(fault, events) for fault in faults]
    rows: list[Any] = []
    for process in dict.fromkeys(fault.process for fault in faults):
        for name in SIGNALS:
            times = [
                None if healed is None else healed - fault.time
                for fault, healed in zip(faults, healings, strict=True)
                if (fault.process, fault.signal) == (process, name)
            ]
            known = [seconds for seconds in times if seconds is not None]
            if times:
                rows.append(
                    {
                        "process": process,
                        "signal": name,
                        "faults": len(times),
                        "healed": len(known),
                        "not_met_again": len(times) - len(known),
                        "mean_seconds": fmean(known) if known else 0.0,
                        "longest_seconds": max(known, default=0.0),
                    }
                )
    return Report(
        name="chaos", title="Faults, and recoveries until the part is whole again", rows=rows
    )


def _healed_at(fault: Fault, events: list[dict[str, Any]]) -> float | None:
    """When no process of that part was missing any more; None: nobody has missed it."""
    missing: set[str] = set()
    noticed = False
    for event in events:
        who = re.split("[:,]", event["text"], maxsplit=1)[0] if fault.part != "learner" else ""
        if event["kind"] == f"{fault.part} lost":
            missing.add(who)
            noticed = noticed or event["time"] >= fault.time
        elif event["kind"] == f"{fault.part} healed":
            missing.discard(who)
            if noticed and not missing:
                return float(event["time"])
    return None


def _problems(
    run: Path, *, code: int | None, left: list[str], options: argparse.Namespace
) -> list[str]:
    found = []
    if code is None:
        found.append(f"the run had not ended {options.timeout:g} s after the last fault")
    elif code:
        found.append(f"the run ended with exit code {code}")
    steps = _rows(run / "metrics.jsonl")
    if [row["step"] for row in steps] != list(range(1, options.steps + 1)):
        found.append(f"{len(steps)} rows of metrics, not one for each of {options.steps} steps")
    stalest = max((row["async/staleness_max"] for row in steps), default=0)
    if stalest > _MAX_STALENESS:
        found.append(f"staleness {stalest} above {_MAX_STALENESS}")
    if not (run / "status.json").exists():
        return [*found, "it has not begun"]
    groups = dict(json.loads((run / "status.json").read_text())["groups"])
    if groups.pop("drawn") != sum(groups.values()):
        found.append(f"the ledger does not close: {groups}")
    if groups["trained"] != 2 * options.steps:
        found.append(f"{groups['trained']} groups trained on, of {2 * options.steps}")
    if left:
        found.append(f"processes left: {left}")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _last_lines(directory: Path) -> list[str]:
    return (directory / "log").read_text().splitlines()[-8:]


if __name__ == "__main__":
    main()
