"""The files that a run continues: cut back to the step that it goes on from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_ray.errors import ConfigError

_STEP = re.compile(r"step_(\d+)")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRecords:
    """What a run recorded before it was continued; empty for a new run."""

    rewards: tuple[tuple[int, float], ...] = ()  # (step, mean reward)
    accuracy: tuple[tuple[int, float], ...] = ()  # (policy version, accuracy)
    elapsed_s: float = 0.0  # up to the last step


def roll_back(directory: Path, *, step: int) -> EarlierRecords:
    """Remove from a run directory what was recorded of later steps, which are made again.

    Events stay. A last line that was cut while it was written is removed.

    Raises:
        ConfigError: another line is no JSON object.
    """
    rows = _keep(directory / "metrics.jsonl", lambda row: row["step"] <= step)
    events = _keep(directory / "events.jsonl", lambda row: "kind" in row)
    for path in [*directory.glob("samples/step_*"), *directory.glob("bad_steps/step_*")]:
        found = _STEP.match(path.name)
        if found and int(found[1]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    accuracy = {
        row["policy_version"]: row["eval/accuracy"]
        for row in events
        if row["kind"] == "evaluation" and row["policy_version"] <= step
    }
    return EarlierRecords(
        rewards=tuple((r["step"], r["reward/mean"]) for r in rows if r["reward/mean"] is not None),
        accuracy=tuple(sorted(accuracy.items())),
        elapsed_s=rows[-1]["time/elapsed"] if rows else 0.0,
    )


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content at once: whoever reads, whenever it is, sees the old or the new.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _keep(path: Path, is_kept: Callable[[Row], bool]) -> list[Row]:
    """Remove the other lines of a file of JSON objects; return what is left."""
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content.splitlines()
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if is_kept(row):
                kept.append((line, row))
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not content.endswith(b"\n"):
                break
            raise ConfigError(
                f"{path}:{number}: no record of real-ray. Remove the line, or start anew with "
                "--checkpoint.resume never --run.overwrite true"
            ) from None
    text = b"".join(line + b"\n" for line, _ in kept)
    if text != content:
        replace_file(path, text)
    return [row for _, row in kept]
