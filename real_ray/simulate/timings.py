"""Timings: what a simulation assumes of the roles; given by the user, or measured in a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from real_ray.config import load_config
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
        ConfigError: the directory is no run, or has too few steps.
    """
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"--like: {path} does not exist. Give the directory of a run")
    config = load_config(directory / "config.yaml")
    rows = _rows(path)[1:]
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
    rows: list[dict[str, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--like: {path}, line {number} is no JSON: {error}") from error
        missing = [name for name in _NEEDED if not isinstance(row.get(name), int | float)]
        if missing:
            raise ConfigError(f"--like: {path}, line {number} has no number for {missing[0]}")
        rows.append(row)
    return rows
