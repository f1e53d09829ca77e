"""ConsoleTracker: the run as people see it in a terminal or in a job log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from real_ray.buffer import GroupState
from real_ray.tracking.base import Tracker
from real_ray.types import SampleRecord

_MAX_ROWS = 25
_BAR = 12  # characters of a full reward bar


class ConsoleTracker(Tracker):
    """A live table in a terminal; one aligned line per step elsewhere."""

    def __init__(self, console: Console, *, num_steps: int, num_slots: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._num_slots = num_slots
        self._rows: list[Mapping[str, float]] = []
        self._counts: Mapping[GroupState, int] = dict.fromkeys(GroupState, 0)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def pipeline(self, counts: Mapping[GroupState, int]) -> None:
        self._counts = counts
        self._refresh()

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._rows.append(metrics)
        if self._live is None:
            self._console.print(_line(metrics, self._num_steps), highlight=False, soft_wrap=True)
        self._refresh()

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self._console.print(
            f"accuracy of policy version {policy_version} on {num_prompts} held-out prompts: "
            f"[bold]{accuracy:.1%}[/bold]",
            highlight=False,
        )

    def event(self, kind: str, text: str) -> None:
        self._console.print(f"[yellow]{kind}:[/yellow] ", Text(text), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _refresh(self) -> None:
        if self._live is None:
            return
        self._live.update(Group(self._table(), self._status()))
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("step", "reward", "", "two-sided", "staleness", "tok/s"):
            table.add_column(title, justify="left" if not title else "right")
        for title in ("generate", "train", "sync", "step s", "queue"):
            table.add_column(title, justify="right")
        for row in self._rows[-_MAX_ROWS:]:
            reward = row["reward/mean"]
            filled = round(_BAR * min(max(reward, 0.0), 1.0))
            table.add_row(
                f"{int(row['step'])}/{self._num_steps}",
                f"{reward:.3f}",
                f"[green]{'━' * filled}[/green][dim]{'─' * (_BAR - filled)}[/dim]",
                f"{row['real/two_sided']:.0%}",
                f"{row['async/staleness_mean']:.1f} (max {int(row['async/staleness_max'])})",
                f"{row['perf/tokens_per_second']:.0f}",
                f"{row['time/generate']:.1f} s",
                f"{row['time/train']:.1f} s",
                f"{row['time/sync']:.1f} s",
                f"{row['time/step']:.1f}",
                f"{int(row['async/buffer'])}",
            )
        return table

    def _status(self) -> Text:
        used = sum(self._counts.values())
        parts = [f"{state.value} {count}" for state, count in self._counts.items()]
        return Text(f"groups: {' · '.join(parts)} · slots {used}/{self._num_slots}", style="dim")


def _line(row: Mapping[str, float], num_steps: int) -> str:
    return (
        f"step {int(row['step']):>4}/{num_steps}  reward {row['reward/mean']:6.3f}  "
        f"two-sided {row['real/two_sided']:4.0%}  "
        f"staleness {row['async/staleness_mean']:3.1f} (max {int(row['async/staleness_max'])})  "
        f"tok/s {row['perf/tokens_per_second']:6.0f}  generate {row['time/generate']:5.1f} s  "
        f"train {row['time/train']:5.1f} s  sync {row['time/sync']:4.1f} s  "
        f"step {row['time/step']:5.1f} s  queue {int(row['async/buffer'])}"
    )
