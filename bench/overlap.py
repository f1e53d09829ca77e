"""Measure how well the driver overlaps generation with training and weight syncs.

The driver runs on roles that only sleep. Ideal are max(generate, train + sync) for a step at
rollout.max_staleness 1, and the sum at 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any

from arguments import at_least, even, seconds
from report import Report
from rich.console import Console

from real_ray.config import Config
from real_ray.simulate import Timings, constant, run_in_virtual_time, run_plan

_RATIOS = (0.25, 0.5, 0.9, 1.1, 2.0, 4.0)  # generate / (train + sync)
_TARGET = 1.03  # of the ideal asynchronous step
_FILLS = 3  # steps until the pipeline is full
_SYNC = 0.2  # share of train + sync


def main() -> None:
    options = _parse()
    rows = [_row(ratio, options) for ratio in _RATIOS]
    report = Report(
        name="overlap", title="Seconds of a step: median of the warm ones, wall clock", rows=rows
    )
    console = Console(width=None if Console().is_terminal else 200)
    console.print(report.table())
    worst = max(float(row["asynchronous/ideal"]) for row in rows)
    console.print(f"asynchronous / ideal: worst {worst:.4f}, target at most {_TARGET}")
    if options.json:
        options.json.write_text(
            json.dumps({"target": _TARGET, "reached": worst, "overlap": rows}, indent=1)
        )


def _row(ratio: float, options: argparse.Namespace) -> dict[str, float]:
    behind = options.seconds / max(1.0, ratio)  # train + sync
    generate = ratio * behind
    timings = Timings(
        generate=constant(generate),
        score=constant(0),
        train=constant(behind * (1 - _SYNC)),
        sync=constant(behind * _SYNC),
        pause=constant(0),
        groups_per_generator=options.groups // 2,
    )
    steps, groups = options.steps + _FILLS, options.groups
    configs = [_config(max_staleness, steps, groups) for max_staleness in (0, 1)]
    synchronous, asynchronous = (asyncio.run(_step(config, timings)) for config in configs)
    virtual = [run_in_virtual_time(_step(config, timings)) for config in configs]
    total, ideal = generate + behind, max(generate, behind)
    return {
        "generate": generate,
        "train_+_sync": behind,
        "synchronous": synchronous,
        "synchronous/sum": synchronous / total,
        "asynchronous": asynchronous,
        "asynchronous/ideal": asynchronous / ideal,
        "virtual_synchronous/sum": virtual[0] / total,
        "virtual_asynchronous/ideal": virtual[1] / ideal,
        "synchronous/asynchronous": synchronous / asynchronous,
    }


async def _step(config: Config, timings: Timings) -> float:
    """Median seconds of a step once the pipeline is full."""
    clock = asyncio.get_running_loop().time
    ends: list[float] = []
    await run_plan(config, timings, progress=lambda step: ends.append(clock()))
    return median(b - a for a, b in zip(ends[_FILLS - 1 :], ends[_FILLS:], strict=False))


def _config(max_staleness: int, steps: int, groups: int) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"num_steps": steps},
        "model": {"name_or_path": "none"},
        "data": {"train": "arithmetic"},
        "rollout": {"max_staleness": max_staleness, "num_generators": 2},
        "learner": {"prompts_per_step": groups},
    }
    return Config.model_validate(sections)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=seconds, default=0.5, help="of the longer part; default: 0.5"
    )
    parser.add_argument("--steps", type=at_least(1), default=20, help="warm ones; default: 20")
    parser.add_argument("--groups", type=even, default=8, help="of a step, even; default: 8")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
