"""Measure the learner: its speed against a plain Hugging Face loop, and its memory.

See bench/README.md for what is compared and why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import at_least

if TYPE_CHECKING:
    from report import Report
    from trainers import Settings

_SECTIONS = ("speed", "memory", "two-pass")
_LAYOUTS = ("padded", "packed", "shared_prefix")


def main() -> None:
    options = _parse()
    # Before anything that reads it is imported, here and in the workers.
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": options.device}
    from rich.console import Console
    from trainers import Settings

    settings = Settings(
        model=options.model or _demo_model(),
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
    )
    console = Console(width=None if Console().is_terminal else 200)
    machine = _machine(settings)
    console.print(machine)
    reports: list[Report] = []
    for report in _reports(settings, options):
        reports.append(report)
        console.print(report.table())
        if options.json:  # after each, so that an interrupted run leaves what it has
            options.json.write_text(
                json.dumps({"machine": machine, **{r.name: r.rows for r in reports}}, indent=1)
            )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="directory or hub name; default: the model of the demo")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="default: 3")
    parser.add_argument(
        "--section", choices=_SECTIONS, action="append", help="can be repeated; default: all"
    )
    parser.add_argument(
        "--layout", choices=_LAYOUTS, action="append", help="can be repeated; default: see README"
    )
    parser.add_argument(
        "--scale", type=at_least(1), default=1, help="times as many groups, where time is measured"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser.parse_args()


def _reports(settings: Settings, options: argparse.Namespace) -> Iterator[Report]:
    import memory
    import speed
    import two_pass

    from actors.environment import learner_env

    env = learner_env(settings.device)
    sections = options.section or _SECTIONS
    rounds, scale = options.rounds, options.scale
    if "speed" in sections:
        yield from speed.compare(
            settings, layouts=options.layout, rounds=rounds, scale=scale, env=env
        )
    if "two-pass" in sections:
        yield two_pass.compare(settings, rounds=rounds, scale=scale, env=env)
    if "memory" in sections:
        yield from memory.measure(settings, env=env)


def _demo_model() -> str:
    from real_ray.demo_model import obtain

    return str(obtain())


def _machine(settings: Settings) -> dict[str, Any]:
    import torch
    import transformers

    on_cpu = settings.device == "cpu"
    return {
        "device": platform.machine() if on_cpu else torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "dtype": settings.dtype,
        "model": settings.model,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
