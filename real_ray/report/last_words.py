"""What a run says when it ends."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from real_ray.report.reward_curve import draw_reward_curve
from real_ray.tracking import RunDirectory
from real_ray.tracking.summary import SummaryTracker

_FEW = 3  # steps that a mean at the start and at the end is taken over


def draw(run: RunDirectory, summary: SummaryTracker, *, title: str) -> None:
    """Draw the reward curve, if there was a step."""
    if summary.rewards:
        draw_reward_curve(summary.rewards, run.reward_curve, title=title, accuracy=summary.accuracy)


def of_a_finished_run(run: RunDirectory, summary: SummaryTracker, *, model: Path | None) -> str:
    """How it went, and where everything is."""
    first, last = summary.rewards[:_FEW], summary.rewards[-_FEW:]
    reward = (
        f"{fmean(first):.2f} (first {len(first)} steps) -> {fmean(last):.2f} (last {len(last)})"
    )
    lines = ["", f"done: {len(summary.rewards)} steps, reward {reward}"]
    if len(summary.accuracy) > 1:
        (_, before), (_, after) = summary.accuracy[0], summary.accuracy[-1]
        lines.append(f"accuracy on held-out prompts: {before:.1%} before -> {after:.1%} after")
    files = {
        "metrics": run.metrics,
        "samples": run.samples,
        "reward curve": run.reward_curve,
        "model": model,
    }
    lines += [f"  {name:<13}{path}" for name, path in files.items() if path]
    return "\n".join(lines)


def of_a_stopped_run(
    run: RunDirectory, summary: SummaryTracker, *, signal: str, num_steps: int
) -> str:
    """How far it came when a signal ended it."""
    return (
        f"stopped by {signal} after step {len(summary.rewards)} of {num_steps}; what was recorded "
        f"is in {run.path}"
    )


def of_a_failed_run(run: RunDirectory, summary: SummaryTracker, *, num_steps: int) -> str:
    """How far it came, where to look, and how to start it again."""
    return (
        f"the run failed after step {len(summary.rewards)} of {num_steps}\n"
        f"  recorded     {run.path}\n"
        f"  actor logs   {run.logs}\n"
        f"  start again  real-ray train {run.path / 'config.yaml'} --run.overwrite true"
    )
