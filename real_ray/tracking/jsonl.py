"""JsonlTracker: metrics, events and samples as JSON lines in the run directory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_ray.tracking.base import Tracker
from real_ray.tracking.run_dir import RunDirectory
from real_ray.types import SampleRecord


class JsonlTracker(Tracker):
    """Appends and flushes each record at once, so that a killed run keeps what it had."""

    def __init__(self, run: RunDirectory, *, samples: bool) -> None:
        self._run = run
        self._samples = samples
        self._began = time.time()

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._append(self._run.metrics, {**metrics, "time/elapsed": time.time() - self._began})
        if self._samples:
            path = self._run.samples / f"step_{int(metrics['step']):06d}.jsonl"
            self._append(path, *(dataclasses.asdict(sample) for sample in samples))

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self.event(
            "evaluation",
            f"version {policy_version}: {accuracy:.3f} of {num_prompts} prompts",
            {"policy_version": policy_version, "eval/accuracy": accuracy},
        )

    def event(self, kind: str, text: str, data: Mapping[str, Any] | None = None) -> None:
        self._append(
            self._run.events, {"time": time.time(), "kind": kind, "text": text, **(data or {})}
        )

    def _append(self, path: Path, *records: Mapping[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
