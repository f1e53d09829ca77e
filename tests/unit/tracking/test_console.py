"""What a person sees of a run, in a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from real_ray.buffer import GroupState
from real_ray.tracking.console import ConsoleTracker

METRICS: dict[str, float] = {
    "step": 1,
    "reward/mean": 0.5,
    "real/two_sided": 0.75,
    "async/staleness_mean": 0.5,
    "async/staleness_max": 1,
    "async/buffer": 2,
    "time/generate": 3.14,
    "time/train": 12.0,
    "time/sync": 0.96,
    "time/step": 15.1,
    "perf/tokens_per_second": 321.4,
}
COUNTS = {GroupState.GENERATING: 3, GroupState.SCORING: 1, GroupState.READY: 2}


class Screen:
    """A tracker, and what it wrote."""

    def __init__(self, *, terminal: bool = False, width: int = 160, step: int = 0) -> None:
        self._file = io.StringIO()
        self.tracker = ConsoleTracker(
            Console(
                file=self._file,
                force_terminal=terminal,
                width=width,
                _environ={"TERM": "xterm"},
            ),
            num_steps=20,
            num_slots=8,
            step=step,
        )

    @property
    def raw(self) -> str:
        return self._file.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.raw.splitlines()


def test_a_row_for_each_step_below_one_header() -> None:
    screen = Screen()
    screen.tracker.step(METRICS, ())
    screen.tracker.step(METRICS | {"step": 2, "async/buffer": 4}, ())
    header, first, second = screen.lines
    assert re.split(r" {2,}", header.strip()) == [
        "step",
        "reward",
        "two-sided",
        "staleness",
        "tok/s",
        "generate",
        "train",
        "sync",
        "step",
        "queue",
    ]
    assert re.split(r" {2,}|(?<=\d) (?=━)|(?<=─)  ", first.strip()) == [
        "1/20",
        "0.500",
        "━━━━━━──────",
        "75%",
        "0.5, max 1",
        "321",
        "3.1 s",
        "12.0 s",
        "1.0 s",
        "15.1 s",
        "2",
    ]
    assert second.split()[0] == "2/20"
    assert second.split()[-1] == "4"


def test_a_continued_run_has_the_header_too() -> None:
    screen = Screen(step=12)
    screen.tracker.step(METRICS | {"step": 13}, ())
    screen.tracker.step(METRICS | {"step": 14}, ())
    header, first, second = screen.lines
    assert header.split()[0] == "step"
    assert (first.split()[0], second.split()[0]) == ("13/20", "14/20")


@pytest.mark.parametrize("staleness", [0, 8])
def test_columns_end_below_their_names(staleness: int) -> None:
    screen = Screen()
    stale = {"async/staleness_mean": float(staleness), "async/staleness_max": staleness}
    screen.tracker.step(METRICS | stale, ())
    header, row = screen.lines
    ends = [match.end() for match in re.finditer(r"\S+", header)]
    values = ["1/20", "0.500", "75%", f"max {staleness}", "321", "3.1 s", "12.0 s", "1.0 s"]
    position = 0
    for end, value in zip(ends, [*values, "15.1 s", "2"], strict=True):
        position = row.index(value, position) + len(value)
        assert position == end, f"{value!r} is not below its name:\n{header}\n{row}"


@pytest.mark.parametrize(
    ("reward", "filled"), [(0.0, 0), (1.0, 12), (0.25, 3), (-3.0, 0), (2.5, 12)]
)
def test_the_bar_is_the_reward_between_0_and_1(reward: float, filled: int) -> None:
    screen = Screen()
    screen.tracker.step(METRICS | {"reward/mean": reward}, ())
    row = screen.lines[1]
    assert f" {reward:.3f} " + "━" * filled + "─" * (12 - filled) + " " in row


def test_rows_are_never_wrapped() -> None:
    screen = Screen(width=40)
    screen.tracker.step(METRICS, ())
    screen.tracker.event("group failed", "word " * 40)
    assert len(screen.lines) == 3


def test_events_are_shown_as_they_are() -> None:
    screen = Screen()
    screen.tracker.event("group failed", "group [bold]a[/bold] member [/x] :smile:")
    screen.tracker.evaluation(3, 0.125, 32)
    assert screen.lines == [
        "group failed: group [bold]a[/bold] member [/x] :smile:",
        "accuracy of policy version 3 on 32 held-out prompts: 12.5%",
    ]


def test_a_log_holds_rows_and_no_live_line() -> None:
    screen = Screen()
    screen.tracker.pipeline(COUNTS)
    screen.tracker.step(METRICS, ())
    screen.tracker.pipeline(COUNTS)
    screen.tracker.close()
    assert len(screen.lines) == 2
    assert "\x1b" not in screen.raw
    assert "groups" not in screen.raw


def test_a_terminal_shows_the_pipeline() -> None:
    screen = Screen(terminal=True)
    screen.tracker.step(METRICS, ())
    screen.tracker.pipeline(COUNTS)
    screen.tracker.event("retry", "once")  # a line above the live one draws that again at once
    try:
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.raw)
        assert "step 2/20 · groups: generating 3 · scoring 1 · ready 2 · slots 6/8" in shown
        assert screen.raw.rfind("\x1b[?25l") >= 0, "the cursor is hidden while the line is live"
    finally:
        screen.tracker.close()
    assert screen.raw.rfind("\x1b[?25h") > screen.raw.rfind("\x1b[?25l"), "the cursor is back"


def test_a_terminal_shows_the_step_that_a_continued_run_is_at() -> None:
    screen = Screen(terminal=True, step=12)
    screen.tracker.pipeline(COUNTS)
    screen.tracker.event("retry", "once")
    screen.tracker.close()
    assert "step 13/20" in screen.raw


def test_closing_before_anything_happened_is_quiet() -> None:
    screen = Screen()
    screen.tracker.close()
    assert screen.raw == ""
