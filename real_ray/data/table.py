"""Rows of one source, with the place of each row for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A dataset as it was read, before any check of its contents.

    Example: ``Table(source="sums.csv", columns=("prompt", "answer"), rows=rows, lines=(2, 3))``
    """

    source: str  # as the user named it
    columns: tuple[str, ...]  # of all rows together
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[int] | None = None  # line of each row in a text file, from 1

    def place(self, row: int) -> str:
        """Return where a row is: ``file:line``, or its number counted from 0."""
        if self.lines is not None:
            return f"{self.source}:{self.lines[row]}"
        return f"{self.source}, row {row} (counted from 0)"
