"""JsonlTracker: metrics, events and samples as JSON lines in the run directory."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_ray.errors import RunError
from real_ray.tracking.base import Tracker
from real_ray.tracking.records import roll_back
from real_ray.tracking.run_dir import RunDirectory
from real_ray.types import SampleRecord


class JsonlTracker(Tracker):
    """Appends and flushes each record at once, so that a killed run keeps what it had.

    JSON has no NaN or infinity: such a number is written as null.

    Args:
        samples: write them too.
        elapsed_s: that the run took before it was continued.

    Raises:
        RunError: a file cannot be written, as on a full disk.
    """

    def __init__(self, run: RunDirectory, *, samples: bool, elapsed_s: float = 0.0) -> None:
        self._run = run
        self._samples = samples
        self._began = time.monotonic() - elapsed_s

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        elapsed = time.monotonic() - self._began
        self._append(self._run.metrics, {**metrics, "time/elapsed": elapsed})
        if self._samples:
            path = self._run.samples / f"step_{int(metrics['step']):06d}.jsonl"
            self._append(path, *(dataclasses.asdict(sample) for sample in samples))

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self.event(
            "evaluation",
            f"policy version {policy_version}: accuracy {accuracy:.3f} on {num_prompts} prompts",
            {"policy_version": policy_version, "eval/accuracy": accuracy},
        )

    def event(self, kind: str, text: str, data: Mapping[str, Any] | None = None) -> None:
        self._append(
            self._run.events, {"time": time.time(), "kind": kind, "text": text, **(data or {})}
        )

    def rolled_back(self, step: int) -> None:
        roll_back(self._run.path, step=step)

    def _append(self, path: Path, *records: Mapping[str, Any]) -> None:
        try:
            # The escapes of what UTF-8 lacks, as half a surrogate pair, are those of JSON.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(_line(record) for record in records)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written: {error.strerror}. Make room there, or choose another "
                "place with --run.output_dir"
            ) from error


def _line(record: Mapping[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"
