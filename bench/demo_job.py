"""The demo's job: seconds per step against a plain synchronous Hugging Face loop.

See bench/README.md for what is compared and why.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jobs import WARM, Job, Metrics, run_demo, run_plain
from report import Report, Row

_GOAL, _WINDOW = 0.9, 3  # mean reward of so many steps
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
        plain.append(
            run_plain(
                {
                    "model.name_or_path": model,
                    "run.num_steps": str(options.steps),
                    "run.seed": str(seed),
                },
                env=learner_env("cpu"),
            )
        )
        ours.append(
            run_demo(
                [*("--model", model, "--run.seed", str(seed)), *options.flags],
                num_steps=options.steps,
            )
        )
        reports = _reports(plain, ours)
        if options.json:  # after each round, so that an interrupted run leaves what it has
            _write(options.json, reports, plain, ours)
    reports.append(_learner_alone(model, options.seed))
    if options.json:
        _write(options.json, reports, plain, ours)
    for report in reports:
        console.print(report.table())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name; default: the model of the demo")
    parser.add_argument("--rounds", type=int, default=2, help="default: 2, each with another seed")
    parser.add_argument("--steps", type=int, default=20, help="of each run; default: 20")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; default: 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    parser.add_argument(
        "flags", nargs="*", help="after --: flags of real-ray demo, as in -- --loss.tau 0.3"
    )
    options = parser.parse_args()
    if options.steps <= WARM or options.rounds < 1:
        parser.error(f"--steps must be above {WARM}, and --rounds above 0")
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
                "steps_to_0.9": [_steps_to_goal(of_round) for of_round in rewards],
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
    found: dict[str, Any] = {report.name: report.rows for report in reports}
    found["steps"] = {"plain": plain, "real-ray": [job.steps for job in ours]}
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
