"""Optimiser steps that were skipped: counted, and kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from groups import make_group

from actors.bad_steps import BadSteps
from actors.zero import StepOutcome
from real_ray.errors import LearnerError
from real_ray.types import RolloutGroup, SampleRecord

GOOD = StepOutcome(grad_norm=2.0, applied=True)
BAD = StepOutcome(grad_norm=math.inf, applied=False)
GROUPS = [
    make_group("sums:1@0", prompt_length=3, lengths=(2, 4), rewards=(1, 0)),
    make_group("sums:2@0", prompt_length=2, lengths=(1, 5), rewards=(0, 0)),
]


def record(group: RolloutGroup, index: int, score: float = 0.25) -> SampleRecord:
    completion = group.sampled.completions[index]
    return SampleRecord(
        uid=group.uid,
        index=index,
        prompt="3+4",
        completion="7\n",
        answer="7",
        reward=float(group.rewards[index]),
        label=None,
        score=score,
        weight=-0.5,
        oldest_version=3,
        newest_version=4,
        num_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
    )


class Rank:
    def __init__(self, directory: Path, *, rank: int = 0, allowed_in_a_row: int = 3) -> None:
        self.steps = BadSteps(str(directory), rank=rank, allowed_in_a_row=allowed_in_a_row)

    def after(
        self,
        outcome: StepOutcome,
        *,
        version: int = 17,
        index: int = 0,
        records: list[SampleRecord] | None = None,
    ) -> list[str]:
        return self.steps.after(outcome, version, index, records or [], GROUPS)


def written(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def test_a_step_that_was_applied_leaves_nothing(tmp_path: Path) -> None:
    assert Rank(tmp_path).after(GOOD, records=[record(GROUPS[0], 0)]) == []
    assert list(tmp_path.iterdir()) == []


def test_a_skipped_step_is_told_and_its_groups_are_kept(tmp_path: Path) -> None:
    # Of the first group this rank has one member only.
    records = [record(GROUPS[0], 1), record(GROUPS[1], 0), record(GROUPS[1], 1)]
    (warning,) = Rank(tmp_path, rank=2).after(BAD, records=records)
    path = tmp_path / "bad_steps" / "step_000017" / "rank_2.jsonl"
    assert warning == (
        "step 17: the loss or gradient is not finite (norm inf), so the step was skipped; its "
        f"groups are in {path.parent}"
    )
    lines = written(path)
    assert [(line["uid"], line["index"]) for line in lines] == [
        ("sums:1@0", 1),
        ("sums:2@0", 0),
        ("sums:2@0", 1),
    ]
    assert lines[0]["score"] == 0.25
    assert lines[0]["label"] is None
    assert lines[0]["completion"] == "7\n"
    for line, group, index in zip(lines, [GROUPS[0], GROUPS[1], GROUPS[1]], (1, 0, 1), strict=True):
        completion = group.sampled.completions[index]
        assert line["prompt_ids"] == group.sampled.prompt.token_ids.tolist()
        assert line["completion_ids"] == completion.token_ids.tolist()
        kept = np.array(line["generator_logprobs"], dtype=np.float32)
        assert np.array_equal(kept, completion.generator_logprobs), "not to the last bit"


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(score: float, tmp_path: Path) -> None:
    Rank(tmp_path).after(BAD, records=[record(GROUPS[0], 0, score)])
    (line,) = written(tmp_path / "bad_steps" / "step_000017" / "rank_0.jsonl")
    assert line["score"] is None


def test_each_optimiser_step_and_rank_has_its_file(tmp_path: Path) -> None:
    for rank in range(2):
        steps = Rank(tmp_path, rank=rank, allowed_in_a_row=9)
        for index in range(2):
            steps.after(BAD, index=index)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.jsonl"))
    assert files == [
        "bad_steps/step_000017/rank_0.jsonl",
        "bad_steps/step_000017/rank_1.jsonl",
        "bad_steps/step_000017_1/rank_0.jsonl",
        "bad_steps/step_000017_1/rank_1.jsonl",
    ]


def test_too_many_in_a_row_end_the_run_and_the_last_is_kept_too(tmp_path: Path) -> None:
    rank = Rank(tmp_path, allowed_in_a_row=3)
    for version in (1, 2):
        assert len(rank.after(BAD, version=version)) == 1
    with pytest.raises(LearnerError, match=r"^step 3: .*in a row: 3 \(learner\.max_bad_steps\)"):
        rank.after(BAD, version=3, records=[record(GROUPS[0], 0)])
    assert len(written(tmp_path / "bad_steps" / "step_000003" / "rank_0.jsonl")) == 1


def test_a_good_step_in_between_starts_the_count_again(tmp_path: Path) -> None:
    rank = Rank(tmp_path, allowed_in_a_row=2)
    for version in range(1, 9, 2):
        assert rank.after(BAD, version=version)
        assert rank.after(GOOD, version=version + 1) == []


def test_none_may_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="in a row: 1"):
        Rank(tmp_path, allowed_in_a_row=1).after(BAD)
