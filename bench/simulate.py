"""Compare runs of the demo with their simulations: seconds per step, in their own timings.

A simulation knows of a run what `real-ray simulate CONFIG --like RUN` reads: its config, and how
long generations, rewards, optimiser steps and weight syncs took in each step but the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from arguments import finished_run
from report import Report
from rich.console import Console

from real_ray.config import Config, load_config
from real_ray.simulate import simulate, timings_of_run

_TARGET = 0.1  # largest deviation
_NUM_STEPS = 3000  # of a simulation: so many that chance has no part in its mean


def main() -> None:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="real-ray-bench-") as place:
        runs = options.run or [
            _demo(Path(place), options, max_staleness=m) for m in options.max_staleness or (0, 1, 2)
        ]
        rows = [_row(run) for run in runs]
    report = Report(name="simulation", title="Seconds of a step, the first one left out", rows=rows)
    console = Console(width=None if Console().is_terminal else 200)
    console.print(report.table())
    worst = max(abs(float(row["simulated/measured"]) - 1) for row in rows)
    console.print(f"deviation: worst {worst:.1%}, target at most {_TARGET:.0%}")
    if options.json:
        options.json.write_text(
            json.dumps({"target": _TARGET, "reached": worst, report.name: rows}, indent=1)
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Everything else goes to the demo, as --model PATH or --rollout.num_generations 4.",
    )
    parser.add_argument(
        "--run",
        type=finished_run,
        action="append",
        metavar="DIR",
        help="a run that is done, can be repeated; default: runs the demo",
    )
    parser.add_argument("--steps", type=int, default=20, help="of the demo; default: 20")
    parser.add_argument(
        "--max-staleness", type=int, action="append", help="of the demo; default: 0, 1 and 2"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    options, options.demo = parser.parse_known_args()
    return options


def _demo(place: Path, options: argparse.Namespace, *, max_staleness: int) -> Path:
    name = f"staleness_{max_staleness}"
    flags = {
        "run.name": name,
        "run.output_dir": str(place),
        "run.num_steps": str(options.steps),
        "rollout.max_staleness": str(max_staleness),
        "checkpoint.save_steps": "null",
        "checkpoint.save_final": "false",
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    real_ray = Path(sys.executable).with_name("real-ray")
    done = subprocess.run([real_ray, "demo", *words, *options.demo], check=False, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(done.returncode)
    return place / name


def _row(run: Path) -> dict[str, Any]:
    config = load_config(run / "config.yaml")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    steps = [json.loads(line) for line in lines]
    result = simulate(_longer(config), timings_of_run(run))
    measured = fmean(step["time/step"] for step in steps)
    return {
        "max_staleness": config.rollout.max_staleness,
        "steps": len(steps),
        "measured": measured,
        "simulated": result.seconds_per_step,
        "simulated/measured": result.seconds_per_step / measured,
        "waits_for_groups,_measured": fmean(step["time/wait"] for step in steps) / measured,
        "waits_for_groups,_simulated": result.learner_waits_for_groups,
        "staleness,_measured": fmean(step["async/staleness_mean"] for step in steps),
        "staleness,_simulated": result.staleness_mean,
    }


def _longer(config: Config) -> Config:
    run = config.run.model_copy(update={"num_steps": _NUM_STEPS, "num_epochs": None})
    checkpoint = config.checkpoint.model_copy(update={"save_steps": None})
    return config.model_copy(update={"run": run, "checkpoint": checkpoint})


if __name__ == "__main__":
    main()
