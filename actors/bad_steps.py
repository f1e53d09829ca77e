"""Optimiser steps without a finite gradient: counted, and kept for people to look at."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from actors.zero import StepOutcome
from real_ray.errors import LearnerError
from real_ray.types import RolloutGroup, SampleRecord


class BadSteps:
    """Writes this rank's groups of a skipped step to ``bad_steps/`` in the run directory.

    Args:
        allowed_in_a_row: the run ends when so many steps in a row were skipped.
    """

    def __init__(self, run_directory: str, *, rank: int, allowed_in_a_row: int) -> None:
        self._directory = Path(run_directory) / "bad_steps"
        self._rank = rank
        self._allowed_in_a_row = allowed_in_a_row
        self._in_a_row = 0

    def after(
        self,
        outcome: StepOutcome,
        policy_version: int,
        index: int,
        records: Sequence[SampleRecord],
        groups: Iterable[RolloutGroup],
    ) -> list[str]:
        """Account for an optimiser step.

        Args:
            policy_version: after the batch.
            index: of the optimiser step in its batch.
            records: of this rank's members.

        Returns:
            What the user should know; nothing if the step was applied.

        Raises:
            LearnerError: it was one bad step too many.
        """
        if outcome.applied:
            self._in_a_row = 0
            return []
        self._in_a_row += 1
        name = f"step_{policy_version:06d}" + (f"_{index}" if index else "")
        path = self._directory / name / f"rank_{self._rank}.jsonl"
        _write(path, records, {group.uid: group for group in groups})
        text = (
            f"step {policy_version}: the loss or gradient is not finite (norm "
            f"{outcome.grad_norm}), so the step was skipped; its groups are in {path.parent}"
        )
        if self._in_a_row >= self._allowed_in_a_row:
            raise LearnerError(
                f"{text}. Steps skipped in a row: {self._in_a_row} (learner.max_bad_steps). Lower "
                "learner.learning_rate, or use learner.dtype float32"
            )
        return [text]


def _write(path: Path, records: Iterable[SampleRecord], groups: dict[str, RolloutGroup]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            sampled = groups[record.uid].sampled
            completion = sampled.completions[record.index]
            tokens = {
                "prompt_ids": sampled.prompt.token_ids.tolist(),
                "completion_ids": completion.token_ids.tolist(),
                "generator_logprobs": completion.generator_logprobs.tolist(),
            }
            values = {
                # JSON has no NaN or infinity, and such a score is what is looked for here.
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(record).items()
            }
            file.write(json.dumps(values | tokens, allow_nan=False) + "\n")
