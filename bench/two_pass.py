"""What it costs that groups are cut: the pass without gradients, and smaller micro-batches."""

from __future__ import annotations

from statistics import median

from batches import Shape
from report import Report, Row
from trainers import Settings
from workers import TimedStep, Worker

_PROMPT = 16  # tokens, which each part of a cut group repeats


def compare(settings: Settings, *, rounds: int, scale: int, env: dict[str, str]) -> Report:
    """The same batch with three budgets, in turns: groups whole, just cut, and cut in two.

    Args:
        scale: times as many groups.
    """
    length = 32 if settings.device == "cpu" else 512
    shape = Shape(
        num_groups=3 * scale,
        num_generations=8,
        prompt_tokens=_PROMPT,
        completion_tokens=(length, length),
    )
    group_tokens = _PROMPT + 8 * (length - 1)
    budgets = {
        "whole": group_tokens,  # one group in a micro-batch
        "just cut": group_tokens - 1,  # nearly the same micro-batches, but a member goes elsewhere
        "cut in two": _PROMPT + 4 * (length - 1),
    }
    steps: dict[str, list[TimedStep]] = {name: [] for name in budgets}
    with Worker("shared_prefix", settings, env) as worker:
        worker.timed_step(shape, max_tokens=group_tokens)
        for _ in range(rounds):
            for name, budget in budgets.items():
                steps[name].append(worker.timed_step(shape, max_tokens=budget))
    return Report(
        name="two passes",
        title=f"Full step by token budget: {shape}",
        rows=[_row(name, budgets[name], steps) for name in budgets],
    )


def _row(name: str, budget: int, steps: dict[str, list[TimedStep]]) -> Row:
    seconds = [step.seconds for step in steps[name]]
    ratios = [s / whole.seconds for s, whole in zip(seconds, steps["whole"], strict=True)]
    info = steps[name][0].info
    return {
        "groups": name,
        "max_tokens": budget,
        "micro-batches": info.num_microbatches,
        "score_passes": info.num_score_passes,
        "seconds": seconds,
        "median_s": median(seconds),
        "cpu_seconds": median(step.cpu_seconds for step in steps[name]),
        "times_whole": ratios,
        "median_times_whole": median(ratios),
        "grad_norms": [step.info.grad_norm for step in steps[name]],
    }
