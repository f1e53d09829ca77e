"""Readers for dataset files on this machine."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from real_ray.data.table import Table
from real_ray.errors import DataError


def read_file(path: Path, *, source: str) -> Table:
    """Read a .jsonl, .json, .csv or .parquet file.

    Args:
        path: the file.
        source: how the user named it; appears in errors and uids.

    Raises:
        DataError: unsupported ending, unreadable file, or bad syntax (with file and line).
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        endings = ", ".join(FILE_ENDINGS)
        raise DataError(f"{source}: unsupported file ending `{path.suffix}`; use one of {endings}")
    try:
        return reader(path, source)
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path, source: str) -> Table:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except ValueError as error:
                raise DataError(f"{source}:{number}: not valid JSON: {_reason(error)}") from error
            if not text.strip():
                continue
            if not isinstance(row, dict):
                raise DataError(
                    f"{source}:{number}: expected one JSON object with the columns, "
                    f"got {type(row).__name__}"
                )
            rows.append(row)
            lines.append(number)
    return Table(source=source, columns=_union_of_keys(rows), rows=rows, lines=lines)


def _read_json(path: Path, source: str) -> Table:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{source}{line}: not valid JSON: {_reason(error)}. If the file has one object per "
            "line, give it the ending .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{source}: expected a list of JSON objects, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(
                f"{source}, row {number} (counted from 0): expected a JSON object with the "
                f"columns, got {type(row).__name__}"
            )
    return Table(source=source, columns=_union_of_keys(rows), rows=rows)


def _read_csv(path: Path, source: str) -> Table:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        first_line = 1  # of the row being read: a quoted cell may span several
        try:
            columns = tuple(next(reader, ()))
            first_line = reader.line_num + 1
            for cells in reader:
                if cells and len(cells) != len(columns):
                    raise DataError(
                        f"{source}:{first_line}: {len(cells)} cells, but the header has "
                        f"{len(columns)} columns"
                    )
                if cells:
                    rows.append(dict(zip(columns, cells, strict=True)))
                    lines.append(first_line)
                first_line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{source}:{first_line}: not valid CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}: not UTF-8 text, near line {first_line}: {error.reason}"
            ) from error
    return Table(source=source, columns=columns, rows=rows, lines=lines)


def _read_parquet(path: Path, source: str) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{source}: not a readable Parquet file: {error}") from error
    return Table(source=source, columns=tuple(table.column_names), rows=table.to_pylist())


def _union_of_keys(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for row in rows for key in row))


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return str(error)


_READERS: dict[str, Callable[[Path, str], Table]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
FILE_ENDINGS = tuple(_READERS)
