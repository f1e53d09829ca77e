"""Timings: what a simulation assumes of the roles; given by the user, or measured in a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_ray.config import load_config
from real_ray.config.problems import show
from real_ray.errors import ConfigError
from real_ray.simulate.distributions import Distribution, measured

_NEEDED = (
    "time/generate",
    "time/score",
    "time/train",
    "time/sync",
    "time/pause",
    "async/in_flight_updates",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long the roles take, and what goes wrong."""

    generate: Distribution  # a group, on a generator that has room for it
    score: Distribution  # a group, on an idle reward worker
    train: Distribution  # a step, on all learner ranks
    sync: Distribution  # a weight sync, without the wait for running completions
    pause: Distribution  # the first part of it, in which the generators stand still
    failures: float = 0.0  # probability that a generation fails, at its end
    one_sided: float = 0.0  # probability that all rewards of a group are the same
    groups_per_generator: int  # that it runs at once; others wait for them


def timings_of_run(directory: Path) -> Timings:
    """Read the timings of all steps but the first, which warms up, from `metrics.jsonl`.

    They are kept in their order: what slows the learner down may slow generators too.
    `time/generate` is the mean of a step's groups, so they all get the same. It holds the pauses
    in which groups stood still. These are taken off, since a simulated pause delays groups again.

    Raises:
        ConfigError: the directory is no run, has too few steps, or a line that is no step's.
    """
    path = directory / "metrics.jsonl"
    rows = _rows(path)[1:]
    config = load_config(directory / "config.yaml")
    if not rows:
        raise ConfigError(
            f"--like: {path} has fewer than 2 steps, and the first one, which warms up, is left "
            "out. Give a longer run"
        )
    columns = {name: [row[name] for row in rows] for name in _NEEDED}
    pauses = columns["time/pause"]
    groups_per_step = config.learner.prompts_per_step
    # Groups of step n are under way from the sync of step n - max_staleness - 1 on, and so are
    # most likely to meet the next one.
    met = [pauses[0]] * config.rollout.max_staleness + pauses
    generate = [
        max(0.0, seconds - pause * groups / groups_per_step)
        for seconds, pause, groups in zip(
            columns["time/generate"], met, columns["async/in_flight_updates"], strict=False
        )
    ]
    return Timings(
        generate=measured(generate, in_a_row=groups_per_step),
        score=measured(columns["time/score"], in_a_row=groups_per_step),
        train=measured(columns["time/train"]),
        # The weights that the first step trains on are synced too, before all others.
        sync=measured(_last_first(columns["time/sync"])),
        pause=measured(_last_first(pauses)),
        groups_per_generator=-(-config.num_slots // config.rollout.num_generators),
    )


def _last_first(values: list[float]) -> list[float]:
    return [values[-1], *values[:-1]]


def _rows(path: Path) -> list[dict[str, float]]:
    """All lines but a last one that was cut while it was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--like: {path} cannot be read: {error.strerror}. Give the directory of a run"
        ) from error
    rows: list[dict[str, float]] = []
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        row = _object(line)
        if row is None:
            if number == len(lines) and not content.endswith(b"\n"):
                break
            start = line[:40].decode("utf-8", "backslashreplace")
            raise ConfigError(
                f"--like: {path}:{number}: no JSON object (got {start!r}). Give another run"
            )
        for name in _NEEDED:
            value: Any = row.get(name)
            # Refuses true too, and the NaN and Infinity that Python's JSON has.
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"--like: {path}:{number}: {name} must be a finite number from 0 on (got "
                    f"{show(value)}). Give another run"
                )
        rows.append(row)
    return rows


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
