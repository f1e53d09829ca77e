"""Seconds of an optimiser step: the plain loop against the learner in each layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

from batches import Shape
from report import Report, Row, mib
from trainers import Kind, Settings
from workers import TimedStep, Worker

MAX_TOKENS = 16384  # of a micro-batch

_LAYOUTS: list[Kind] = ["padded", "packed", "shared_prefix"]

SHAPES = {
    "demo": Shape(
        num_groups=4,
        num_generations=8,
        prompt_tokens=34,
        completion_tokens=(8, 12),  # what the demo's model samples; 9.9 on average
        longest_completion=12,
    ),
    "long prompt": Shape(
        num_groups=1, num_generations=8, prompt_tokens=1000, completion_tokens=(150, 200)
    ),
}


def compare(
    settings: Settings, *, layouts: list[Kind] | None, rounds: int, scale: int, env: dict[str, str]
) -> Iterator[Report]:
    """All trainers take turns on the same batch, ``rounds`` times for each shape.

    Args:
        layouts: of the learner; None: all, but on CPU only shared prefixes for the long prompt,
            where the others take minutes and, one beside the other, more than 24 GiB.
        scale: times as many groups.
    """
    for name, base in SHAPES.items():
        shape = dataclasses.replace(base, num_groups=base.num_groups * scale)
        all_fit = settings.device == "cuda" or not _is_long(shape)
        chosen = layouts or (_LAYOUTS if all_fit else _LAYOUTS[-1:])
        with ExitStack() as stack:
            kinds: list[Kind] = ["plain", *chosen]
            workers = {kind: stack.enter_context(Worker(kind, settings, env)) for kind in kinds}
            steps, last = _rounds(workers, shape, settings, rounds)
            peaks = {kind: worker.peak_memory() for kind, worker in workers.items()}
        yield Report(
            name=f"speed, {name}",
            title=f"Full step, {name}: {shape}",
            rows=[_speed(kind, steps, peaks[kind]) for kind in workers],
        )
        yield Report(
            name=f"parts, {name}",
            title=f"Parts of a step, {name} (percent of it)",
            rows=[_parts(kind, step) for kind, step in last.items()],
        )


def _is_long(shape: Shape) -> bool:
    return shape.prompt_tokens >= 100


def _rounds(
    workers: dict[Kind, Worker], shape: Shape, settings: Settings, rounds: int
) -> tuple[dict[Kind, list[TimedStep]], dict[Kind, TimedStep]]:
    """Steps of each round, and a last one with its parts."""
    on_cpu = settings.device == "cpu"
    steps: dict[Kind, list[TimedStep]] = {kind: [] for kind in workers}
    if not on_cpu or not _is_long(shape):  # in a long step, what is done once counts little
        for worker in workers.values():
            worker.timed_step(shape, max_tokens=MAX_TOKENS)
    for _ in range(rounds):
        for kind, worker in workers.items():
            steps[kind].append(worker.timed_step(shape, max_tokens=MAX_TOKENS, parts=on_cpu))
    if on_cpu:
        return steps, {kind: timed[-1] for kind, timed in steps.items()}
    # To tell parts apart on a GPU, the host has to wait for it, which would change the times.
    return steps, {
        kind: worker.timed_step(shape, max_tokens=MAX_TOKENS, parts=True)
        for kind, worker in workers.items()
    }


def _speed(kind: Kind, steps: dict[Kind, list[TimedStep]], peak: int) -> Row:
    mine = steps[kind]
    seconds = [step.seconds for step in mine]
    ratios = [p.seconds / s for p, s in zip(steps["plain"], seconds, strict=True)]
    return {
        "trainer": kind,
        "seconds": seconds,
        "median_s": median(seconds),
        "cpu_seconds": median(step.cpu_seconds for step in mine),
        "completion_tok/s": mine[0].completion_tokens / median(seconds),
        "sequence_tok/s": mine[0].sequence_tokens / median(seconds),
        "times_plain": ratios,
        "median_times_plain": median(ratios),
        "grad_norms": [step.info.grad_norm for step in mine],
        "micro-batches": mine[0].info.num_microbatches,
        "peak_MiB": mib(peak),
    }


def _parts(kind: Kind, step: TimedStep) -> Row:
    shares = {name: 100 * s / step.seconds for name, s in sorted(step.parts.items())}
    return {
        "trainer": kind,
        "seconds": step.seconds,
        **shares,
        "rest": 100 - sum(shares.values()),
    }
