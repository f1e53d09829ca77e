"""Results as rows: for JSON as they are, for the eye as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Row = Mapping[str, str | int | float | list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A table. All rows have the same names of columns; units are part of the names."""

    name: str
    title: str
    rows: list[Row]

    def table(self) -> Table:
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for name, value in self.rows[0].items():
            table.add_column(
                name.replace("_", " "), justify="left" if isinstance(value, str) else "right"
            )
        for row in self.rows:
            table.add_row(*map(_text, row.values()))
        return table


def mib(num_bytes: int) -> float:
    """Bytes in MiB."""
    return num_bytes / 2**20


def _text(value: Any) -> str:
    match value:
        case list():
            return " ".join(map(_text, value))
        case float():
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        case _:
            return str(value)
