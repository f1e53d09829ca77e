"""Types of command line options: what is out of bounds is refused before anything starts."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def at_least(bound: int) -> Callable[[str], int]:
    """A whole number of at least so many."""

    def integer(text: str) -> int:
        value = int(text)
        if value < bound:
            raise ArgumentTypeError(f"{value} is below {bound}")
        return value

    return integer


def even(text: str) -> int:
    """An even number of at least two."""
    value = at_least(2)(text)
    if value % 2:
        raise ArgumentTypeError(f"{value} is odd")
    return value


def seconds(text: str) -> float:
    """A finite time above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text} is not a time above 0")
    return value


def finished_run(text: str) -> Path:
    """The directory of a run with its metrics."""
    path = Path(text)
    if not (path / "metrics.jsonl").is_file():
        raise ArgumentTypeError(f"{path} holds no run: {path / 'metrics.jsonl'} is not there")
    return path
