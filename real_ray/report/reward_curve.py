"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_reward_curve(
    rewards: Sequence[float],
    path: Path,
    *,
    title: str,
    accuracy: Sequence[tuple[int, float]] = (),
    window: int = 3,
) -> None:
    """Write a PNG of the mean reward of each step.

    Args:
        rewards: mean reward of steps 1, 2, ...
        accuracy: (step, accuracy) of the evaluations.
        window: steps of the running mean.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(rewards) + 1)
    running = [
        sum(rewards[max(0, i - window) : i]) / len(rewards[max(0, i - window) : i]) for i in steps
    ]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, "o", color="#9ec5e8", markersize=5, label="mean reward of the step")
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
    low = min([0.0, *rewards])
    axes.set_title(title, parse_math=False)  # it holds a path's name
    axes.set(xlabel="step", ylabel="reward", ylim=(low - 0.03, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
