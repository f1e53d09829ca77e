"""What a run says when it ends."""

from __future__ import annotations

from collections.abc import Mapping
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
    lines = ["", f"done: {summary.step_done} steps"]
    rewards = [reward for _, reward in summary.rewards]
    if rewards:
        first, last = rewards[:_FEW], rewards[-_FEW:]
        lines[-1] += (
            f", reward {fmean(first):.2f} (first {len(first)} steps) -> {fmean(last):.2f} "
            f"(last {len(last)})"
        )
    if len(summary.accuracy) > 1:
        (_, before), (_, after) = summary.accuracy[0], summary.accuracy[-1]
        lines.append(f"accuracy on held-out prompts: {before:.1%} before -> {after:.1%} after")
    files = {
        "metrics": run.metrics,
        "samples": run.samples,
        "reward curve": run.reward_curve if rewards else None,
        "model": model,
    }
    facts = {"learner": learner_line(summary.seconds), "groups": groups_line(summary.groups)}
    return _text(lines, {**facts, **files})


def of_a_stopped_run(
    run: RunDirectory,
    summary: SummaryTracker,
    *,
    signal: str,
    num_steps: int,
    checkpoint: Path | None,
) -> str:
    """How far it came when a signal ended it, and how to go on."""
    return _text(
        [f"stopped by {signal} after step {summary.step_done} of {num_steps}"],
        {
            "groups": groups_line(summary.groups),
            "recorded": run.path,
            **how_to_go_on(run.config, checkpoint),
        },
        *_resumable(checkpoint),
    )


def of_a_failed_run(
    run: RunDirectory, summary: SummaryTracker, *, num_steps: int, checkpoint: Path | None
) -> str:
    """How far it came, where to look, and how to go on."""
    return _text(
        [f"the run failed after step {summary.step_done} of {num_steps}"],
        {
            "groups": groups_line(summary.groups),
            "recorded": run.path,
            "actor logs": run.logs,
            **how_to_go_on(run.config, checkpoint),
        },
        *_resumable(checkpoint),
    )


def groups_line(counts: Mapping[str, int]) -> str:
    """The ledger as a sum; what is 0 is left out."""
    parts = [f"{n} {name}" for name, n in counts.items() if n and name != "drawn"]
    return f"{counts['drawn']} drawn = {' + '.join(parts)}" if parts else ""


def learner_line(seconds: Mapping[str, float]) -> str:
    """What the learner did in the time of the steps: who waits shows who limits."""
    total = seconds.get("time/step", 0.0)
    if not total:
        return ""
    parts = {
        "trained": "time/train",
        "waited for groups": "time/wait",
        "waited for evaluations": "time/evaluate",
        "synced weights": "time/sync",
        "saved checkpoints": "time/checkpoint",
    }
    shares = {what: seconds.get(name, 0.0) / total for what, name in parts.items()}
    return ", ".join(f"{what} {share:.0%}" for what, share in shares.items() if share >= 0.005)


def how_to_go_on(config: Path, checkpoint: Path | None) -> dict[str, str]:
    """The command that continues a run, or starts it again."""
    if checkpoint is None:
        return {"start again": f"real-ray train {config} --run.overwrite true"}
    return {"continue": f"real-ray train {config} --checkpoint.resume auto"}


def _resumable(checkpoint: Path | None) -> list[str]:
    """The last line of what did not come to its end, for people and for scripts."""
    if checkpoint is None:
        return []
    return [f"resumable from step {int(checkpoint.name.removeprefix('step_'))}"]


def _text(lines: list[str], facts: Mapping[str, object], *last: str) -> str:
    shown = [f"  {name:<13}{fact}" for name, fact in facts.items() if fact]
    return "\n".join([*lines, *shown, *last])
