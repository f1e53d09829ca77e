"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean


def draw_reward_curve(
    rewards: Sequence[tuple[int, float]],
    path: Path,
    *,
    title: str,
    accuracy: Sequence[tuple[int, float]] = (),
    window: int = 3,
) -> None:
    """Write a PNG of the mean reward of each step.

    Args:
        rewards: (step, mean reward of the step).
        accuracy: (step, accuracy) of the evaluations.
        window: steps of the running mean.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, means = [step for step, _ in rewards], [mean for _, mean in rewards]
    running = [fmean(means[max(0, end - window) : end]) for end in range(1, len(means) + 1)]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, means, "o", color="#9ec5e8", markersize=5, label="mean reward of the step")
    axes.plot(steps, running, color="#1f5f99", linewidth=2, label=f"mean of {window} steps")
    if accuracy:
        axes.plot(
            [step for step, _ in accuracy],
            [value for _, value in accuracy],
            "D",
            color="#d1661f",
            markersize=8,
            label="accuracy on held-out prompts (greedy)",
        )
    low = min([0.0, *means])
    axes.set_title(title, parse_math=False)  # it holds a path's name
    axes.set(xlabel="step", ylabel="reward", ylim=(low - 0.03, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
