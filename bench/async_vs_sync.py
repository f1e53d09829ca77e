"""Asynchronous against synchronous steps of a real model, engine and learner on a core each.

See bench/README.md for what is compared and why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil
from arguments import at_least
from jobs import WARM, Job, role_of, run_demo, tree
from report import Report, Row

_TARGET = 0.9  # of the ideal speed-up
_PARTS = ("generate", "wait", "train", "sync", "pause", "step")


def main() -> None:
    options = _parse()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    from rich.console import Console

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the engine, one for the learner")
    console = Console(width=None if Console().is_terminal else 200)
    jobs: dict[int, list[Job]] = {0: [], 1: []}  # by staleness
    with tempfile.TemporaryDirectory() as directory:
        flags = _flags(Path(directory), options)
        for number in range(options.rounds):
            for staleness in (0, 1) if number % 2 == 0 else (1, 0):
                jobs[staleness].append(
                    run_demo(
                        [*flags, "--rollout.max_staleness", str(staleness)],
                        num_steps=options.steps,
                        look=lambda root: _pin(root, learner=cores[0], generator=cores[1]),
                    )
                )
    reports = [_speed_up(jobs), _parts(jobs)]
    for report in reports:
        console.print(report.table())
    if options.json:
        found = {report.name: report.rows for report in reports}
        steps = {str(staleness): [j.steps for j in of] for staleness, of in jobs.items()}
        options.json.write_text(json.dumps({"target": _TARGET, **found, "steps": steps}, indent=1))


def alternate(completions: Sequence[str], **_: object) -> list[float]:
    """A reward function: half of each group is right, so that every group is trained on."""
    return [float(index % 2) for index in range(len(completions))]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or hub name; default: the model of the demo")
    parser.add_argument("--rounds", type=at_least(1), default=2, help="default: 2")
    parser.add_argument(
        "--steps", type=at_least(WARM + 1), default=13, help="of each run; default: 13"
    )
    parser.add_argument(
        "--length", type=at_least(1), default=96, help="of completions; default: 96 tokens"
    )
    parser.add_argument("--groups", type=at_least(1), default=2, help="of a step; default: 2")
    parser.add_argument("--members", type=at_least(2), default=4, help="of a group; default: 4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser.parse_args()


def _flags(directory: Path, options: argparse.Namespace) -> list[str]:
    """Few and long completions: sampling and training on them take about as long."""
    prompts = directory / "stories.jsonl"
    rows = [
        {"question": f"Write a long story about {n} friends.", "answer": str(n)}
        for n in range(2, 500)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "data.train": str(prompts),
        "data.eval": "null",
        "data.prompt_column": "question",
        "rollout.num_generations": str(options.members),
        "rollout.max_completion_length": str(options.length),
        "rollout.num_threads": "1",
        "learner.num_threads": "1",
        "learner.prompts_per_step": str(options.groups),
        "learner.learning_rate": "1e-7",  # completions stay as long as they are
        "reward.function": f"{Path(__file__).stem}:{alternate.__name__}",
        "checkpoint.save_final": "false",
    }
    # Reward workers import this file.
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    model = ["--model", options.model] if options.model else []
    return [*model, *(word for key, value in keys.items() for word in (f"--{key}", value))]


def _pin(root: psutil.Process, **cores: int) -> None:
    """Bind all threads of the roles to their cores; the rest of the run goes where it likes."""
    for process in tree(root):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            core = cores.get(role_of(process))
            for thread in process.threads() if core is not None else ():
                os.sched_setaffinity(thread.id, {core})


def _speed_up(jobs: dict[int, list[Job]]) -> Report:
    rows: list[Row] = []
    for synchronous, asynchronous in zip(jobs[0], jobs[1], strict=True):
        before, after = (median(job.warm("time/step")) for job in (synchronous, asynchronous))
        generate = median(synchronous.warm("time/generate"))
        learn = median(synchronous.warm("time/train")) + median(synchronous.warm("time/sync"))
        ideal = (generate + learn) / max(generate, learn)
        rows.append(
            {
                "synchronous_s": before,
                "asynchronous_s": after,
                "generate_s": generate,
                "train_and_sync_s": learn,
                "speed-up": before / after,
                "ideal": ideal,
                "share_of_ideal": before / after / ideal,
            }
        )
    worst = min(float(str(row["share_of_ideal"])) for row in rows)
    return Report(
        name="speed-up",
        title=f"Seconds of a step, median after step {WARM}, by round: at least {worst:.3f} of the "
        f"ideal speed-up, target {_TARGET}",
        rows=rows,
    )


def _parts(jobs: dict[int, list[Job]]) -> Report:
    return Report(
        name="parts",
        title="Seconds of the parts of a step",
        rows=[
            {
                "max_staleness": str(staleness),
                **{part: median(job.warm(f"time/{part}")) for part in _PARTS},
                "tokens": median(job.warm("rollout/tokens")),
                **{f"cpu_{role}": seconds for role, seconds in job.cpu_seconds.items()},
            }
            for staleness, of_staleness in jobs.items()
            for job in of_staleness
        ],
    )


if __name__ == "__main__":
    main()
