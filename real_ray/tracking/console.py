"""ConsoleTracker: the run as people see it in a terminal or in a job log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from real_ray.buffer import GroupState
from real_ray.tracking.base import Tracker
from real_ray.types import SampleRecord

_BAR = 12  # characters of a reward of 1
_HEADER = (
    f"{'step':>9}  {'reward':>6} {'':{_BAR}}  two-sided  {'staleness':>10}  {'tok/s':>7}  "
    f"{'generate':>8}  {'train':>7}  {'sync':>7}  {'step':>7}  queue"
)


class ConsoleTracker(Tracker):
    """One aligned row per step; in a terminal also a live line with the state of the pipeline.

    Args:
        step: that the run begins after.
    """

    def __init__(self, console: Console, *, num_steps: int, num_slots: int, step: int = 0) -> None:
        self._console = console
        self._num_steps = num_steps
        self._num_slots = num_slots
        self._done = step
        self._has_header = False
        # Shows nothing where there is no terminal.
        self._status = console.status("starting", spinner_style="cyan")

    def pipeline(self, counts: Mapping[GroupState, int]) -> None:
        parts = " · ".join(f"{state.value} {count}" for state, count in counts.items())
        self._status.update(
            Text(
                f"step {self._done + 1}/{self._num_steps} · groups: {parts} · "
                f"slots {sum(counts.values())}/{self._num_slots}",
                style="dim",
            )
        )
        self._status.start()

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        if not self._has_header:
            self._print(Text(_HEADER, style="dim"))
            self._has_header = True
        self._done = int(metrics["step"])
        self._print(_row(metrics, self._num_steps))

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self._print(
            Text(f"accuracy of policy version {policy_version} on {num_prompts} held-out prompts: ")
            + Text(f"{accuracy:.1%}", style="bold")
        )

    def rolled_back(self, step: int) -> None:
        self._done = step

    def event(self, kind: str, text: str) -> None:
        self._print(Text(f"{kind}: ", style="yellow") + Text(text))

    def close(self) -> None:
        self._status.stop()

    def _print(self, text: Text) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _row(metrics: Mapping[str, float], num_steps: int) -> Text:
    reward = metrics["reward/mean"]
    filled = round(_BAR * min(max(reward, 0.0), 1.0))
    step = f"{int(metrics['step'])}/{num_steps}"
    staleness = f"{metrics['async/staleness_mean']:.1f}, max {int(metrics['async/staleness_max'])}"
    seconds = "  ".join(
        f"{metrics[name]:>{width}.1f} s"
        for name, width in (
            ("time/generate", 6),
            ("time/train", 5),
            ("time/sync", 5),
            ("time/step", 5),
        )
    )
    return Text.assemble(
        f"{step:>9}  {reward:>6.3f} ",
        ("━" * filled, "green"),
        ("─" * (_BAR - filled), "dim"),
        f"  {metrics['real/two_sided']:>9.0%}  {staleness:>10}  "
        f"{metrics['perf/tokens_per_second']:>7.0f}  {seconds}  {int(metrics['async/buffer']):>5}",
    )
