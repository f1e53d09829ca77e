"""Measure the driver: groups per second over Ray actors and in process, and its memory.

The roles answer at once. Over Ray, the limit is the rate of the same two actor calls a group
without driver and pools, in turns, on the same actors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import instant
import psutil
from arguments import at_least
from driver_rates import (
    NUM_GENERATORS,
    NUM_REWARD_WORKERS,
    Work,
    bare_rate,
    driver_rate,
    roles_in_process,
)
from report import Report, mib
from rich.console import Console

from real_ray.activity import Activity
from real_ray.config import ClusterConfig
from real_ray.healing_pool import HealingPool
from real_ray.roles import Roles
from real_ray.tracking import Tracker

_SECTIONS = ("ray", "process", "memory")
_TARGET = 0.6  # of the rate of bare actor calls
_MARKS = (0.1, 0.5, 1.0)  # shares of the groups after which memory is read


def main() -> None:
    options = _parse()
    console = Console(width=None if Console().is_terminal else 200)
    sections = options.section or _SECTIONS
    work = Work(num_groups=options.groups, prompts_per_step=options.prompts_per_step)
    numbers: dict[str, Any] = {}
    if "ray" in sections:
        rates = _over_ray(work, options.rounds)
        reached = median(row["driver/bare"] for row in rates.rows)  # type: ignore[type-var]
        console.print(rates.table())
        console.print(f"driver / bare calls: median {reached:.3f}, target at least {_TARGET}")
        numbers |= {"target": _TARGET, "reached": reached, rates.name: rates.rows}
    if "process" in sections:
        rates = _in_process(work, options.rounds)
        console.print(rates.table())
        numbers[rates.name] = rates.rows
    if "memory" in sections:
        memory = _memory(
            Work(num_groups=options.memory_groups, prompts_per_step=options.prompts_per_step)
        )
        console.print(memory.table())
        numbers[memory.name] = memory.rows
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    number = at_least(1)
    parser.add_argument(
        "--rounds", type=number, default=10, help="default: 10, after one to warm up"
    )
    parser.add_argument("--groups", type=number, default=1280, help="of a round; default: 1280")
    parser.add_argument(
        "--memory-groups",
        type=number,
        default=100_000,
        help="where memory is read; default: 100000",
    )
    parser.add_argument(
        "--prompts-per-step", type=number, default=64, help="default: 64; twice as many at once"
    )
    parser.add_argument(
        "--section", choices=_SECTIONS, action="append", help="can be repeated; default: all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    options = parser.parse_args()
    if min(options.groups, options.memory_groups) < options.prompts_per_step:
        parser.error(
            f"--groups {options.groups} and --memory-groups {options.memory_groups} must be at "
            f"least --prompts-per-step {options.prompts_per_step}: a step takes so many"
        )
    return options


def _over_ray(work: Work, rounds: int) -> Report:
    from actors.cluster import connect

    with connect(ClusterConfig(address="local"), logs=None):
        rows = asyncio.run(_rounds(work, rounds))
    return Report(name="over Ray", title="Groups per second over Ray actors", rows=rows)


async def _rounds(work: Work, rounds: int) -> list[Any]:
    import ray
    from ready_generator import ReadyGenerator

    from actors.reward_pool import RayRewardPool

    config = work.config()
    actor = ray.remote(num_cpus=0, max_concurrency=1000)(instant.Generator)
    generators = [actor.remote() for _ in range(NUM_GENERATORS)]
    worker = ray.remote(num_cpus=0)(instant.RewardWorker)
    rewards = RayRewardPool(
        lambda index: worker.remote(config.rollout.num_generations),
        num_workers=NUM_REWARD_WORKERS,
        function="instant",
        timeout_s=60.0,
        activity=Activity(),
        tracker=Tracker(),
    )
    pool = HealingPool(
        lambda index, num_starts: ReadyGenerator(index, generators[index], config),
        config=config.rollout,
        tracker=Tracker(),
        activity=Activity(),
    )
    keeping = asyncio.create_task(pool.run())
    await pool.has_begun()
    for member in pool.members():
        pool.admit(member)
    roles = Roles(
        generators=pool,
        rewards=rewards,
        learner=instant.Learner(),
        broadcaster=instant.Broadcaster([generator.load.remote for generator in generators]),
    )
    rows = []
    for number in range(rounds + 1):
        began = time.process_time()
        driver = await driver_rate(work, roles)
        between = time.process_time()
        bare = await bare_rate(work, generators, rewards.workers)
        ended = time.process_time()
        rows.append(
            {
                "round": number,
                "driver": driver,
                "bare_calls": bare,
                "driver/bare": driver / bare,
                "driver_CPU_ms_a_group": 1e3 * (between - began) / work.num_groups,
                "bare_CPU_ms_a_group": 1e3 * (ended - between) / work.num_groups,
            }
        )
    keeping.cancel()
    return rows[1:]  # the first one warmed up


def _in_process(work: Work, rounds: int) -> Report:
    rates = [asyncio.run(driver_rate(work, roles_in_process(work))) for _ in range(rounds + 1)][1:]
    return Report(
        name="in process",
        title="Groups per second in process",
        rows=[{"median": median(rates), "rounds": rates}],
    )


def _memory(work: Work) -> Report:
    process = psutil.Process()
    resident = _read_memory(work, lambda: process.memory_info().rss)
    tracemalloc.start()
    allocated = _read_memory(work, lambda: tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    rows: list[Any] = [
        {"MiB after groups": "resident", **resident},
        {"MiB after groups": "allocated by Python", **allocated},
    ]
    return Report(name="memory", title="Memory of the driver in process", rows=rows)


def _read_memory(work: Work, measure: Callable[[], int]) -> dict[str, float]:
    steps = work.config().num_steps
    marks = {max(1, round(share * steps)) for share in _MARKS}
    found: dict[str, float] = {}

    def read(step: int) -> None:
        if step in marks:
            found[str(step * work.prompts_per_step)] = mib(measure())

    asyncio.run(driver_rate(work, roles_in_process(work), after_step=read))
    return found


if __name__ == "__main__":
    main()
