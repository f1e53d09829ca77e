"""The demo's job: seconds per step against a plain synchronous Hugging Face loop.

See bench/README.md for what is compared and why.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from arguments import at_least
from jobs import WARM, Job, Metrics, run_demo, run_plain
from report import Report, Row

from real_ray.cli import DEMO_CONFIG
from real_ray.config import load_config
from real_ray.config.flags import split_flags
from real_ray.errors import UserError

_TARGET = 3.0  # seconds of a step, plain / real-ray
_GOAL, _WINDOW = 0.9, 3  # mean reward of so many steps, to be reached in no more than plain
_STEPS_TO_GOAL = f"steps_to_{_GOAL}"
_PLAIN_PARTS = ("generate", "score", "forward", "backward", "update")
_OUR_PARTS = ("wait", "train", "sync", "pause", "generate", "score")


def main() -> None:
    options = _parse()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    from rich.console import Console

    from actors.environment import learner_env
    from real_ray.demo_model import obtain

    model = options.model or str(obtain())
    plain: list[list[Metrics]] = []
    ours: list[Job] = []
    console = Console(width=None if Console().is_terminal else 200)
    for seed in range(options.seed, options.seed + options.rounds):  # one after the other
        flags = [*options.flags, "--model.name_or_path", model, "--run.seed", str(seed)]
        plain.append(run_plain(flags, num_steps=options.steps, env=learner_env("cpu")))
        ours.append(run_demo(flags, num_steps=options.steps))
        reports = _reports(plain, ours)
        if options.json:  # after each round, so that an interrupted run leaves what it has
            _write(options.json, reports, plain, ours)
    reports.append(_learner_alone(model, options.seed))
    if options.json:
        _write(options.json, reports, plain, ours)
    for report in reports:
        console.print(report.table())
    for line in _against_targets(reports[0]):
        console.print(line)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name; default: the model of the demo")
    parser.add_argument(
        "--rounds", type=at_least(1), default=2, help="default: 2, each with another seed"
    )
    parser.add_argument(
        "--steps", type=at_least(WARM + 1), default=20, help="of each run; default: 20"
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of the first round; default: 0"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    parser.add_argument(
        "flags", nargs="*", help="after --: flags for both loops, as in -- --loss.tau 0.3"
    )
    options = parser.parse_args()
    try:
        flags = split_flags(options.flags)
        load_config(DEMO_CONFIG, [*flags, ("model.name_or_path", "of --model")])
    except UserError as error:
        parser.error(str(error))
    return options


def _reports(plain: Sequence[list[Metrics]], ours: Sequence[Job]) -> list[Report]:
    plain_seconds = [_warm(steps, "seconds") for steps in plain]
    our_seconds = [job.warm("time/step") for job in ours]
    plain_cpu = [median(_warm(steps, "cpu_seconds")) for steps in plain]
    our_cpu = [sum(job.cpu_seconds.values()) for job in ours]
    rows: list[Row] = []
    for name, seconds, cpu, rewards in (
        ("plain", plain_seconds, plain_cpu, [[s["reward"] for s in steps] for steps in plain]),
        ("real-ray", our_seconds, our_cpu, [[s["reward/mean"] for s in j.steps] for j in ours]),
    ):
        medians = [median(of_round) for of_round in seconds]
        rows.append(
            {
                "loop": name,
                "seconds_a_step": medians,
                "median_s": median(medians),
                "cpu_seconds": cpu,
                "times_plain": [median(p) / m for p, m in zip(plain_seconds, medians, strict=True)],
                _STEPS_TO_GOAL: [_steps_to_goal(of_round) for of_round in rewards],
                "last_reward": [fmean(of_round[-_WINDOW:]) for of_round in rewards],
            }
        )
    return [
        Report(
            name="job",
            title=f"A step of the demo's job, median after step {WARM}, by round",
            rows=rows,
        ),
        Report(
            name="plain, parts",
            title="Seconds of its parts, plain loop",
            rows=[{part: median(_warm(steps, part)) for part in _PLAIN_PARTS} for steps in plain],
        ),
        Report(
            name="real-ray, parts",
            title="Seconds of its parts, real-ray: generation and scores of a group overlap with "
            "the rest",
            rows=[
                {
                    **{part: median(job.warm(f"time/{part}")) for part in _OUR_PARTS},
                    **{f"cpu_{role}": seconds for role, seconds in job.cpu_seconds.items()},
                }
                for job in ours
            ],
        ),
    ]


def _against_targets(job: Report) -> Iterator[str]:
    rows: Any = job.rows
    plain, ours = rows
    worst = min(ours["times_plain"])
    yield f"plain / real-ray seconds of a step: worst {worst:.3f}, target at least {_TARGET:g}"
    for before, after in zip(plain[_STEPS_TO_GOAL], ours[_STEPS_TO_GOAL], strict=True):
        yield f"steps to a mean reward of {_GOAL}: {after:g}, target at most {before:g}, as plain"


def _learner_alone(model: str, seed: int) -> Report:
    """What real-ray does not log: the parts of an optimiser step, all groups with both classes."""
    from speed import MAX_TOKENS, SHAPES
    from trainers import Settings
    from workers import Worker

    from actors.environment import learner_env

    settings = Settings(model=model, device="cpu", dtype="bfloat16", seed=seed)
    with Worker("shared_prefix", settings, learner_env("cpu")) as worker:
        steps = [
            worker.timed_step(SHAPES["demo"], max_tokens=MAX_TOKENS, parts=True) for _ in range(4)
        ]
    last = steps[-1]
    return Report(
        name="learner alone",
        title="Seconds of an optimiser step of the learner with all cores to itself",
        rows=[{"step": last.seconds, **last.parts, "cpu_seconds": last.cpu_seconds}],
    )


def _warm(steps: list[Metrics], name: str) -> list[float]:
    return [step[name] for step in steps[WARM:]]


def _steps_to_goal(rewards: list[float]) -> float:
    """Steps until the mean reward of the last three is 0.9; infinite if it never is."""
    for end in range(_WINDOW, len(rewards) + 1):
        if fmean(rewards[end - _WINDOW : end]) >= _GOAL:
            return float(end)
    return float("inf")


def _write(
    path: Path, reports: list[Report], plain: Sequence[list[Metrics]], ours: Sequence[Job]
) -> None:
    found: dict[str, Any] = {"target": _TARGET, **{r.name: r.rows for r in reports}}
    found["steps"] = {"plain": plain, "real-ray": [job.steps for job in ours]}
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
