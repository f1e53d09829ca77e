"""The numbers of one step, from a batch whose numbers are known."""

from __future__ import annotations

import json
import math

import pytest

from real_ray.ledger import Outcome
from real_ray.metrics import StepTimes, step_metrics
from real_ray.types import RolloutTicket, SampledTicket, SyncReport, TrainResult

SYNC = SyncReport(
    policy_version=8,
    seconds=0.9,
    pause_seconds=0.7,
    num_generators=2,
    num_tensors=272,
    num_bytes=269_000_000,
    probe_difference=0.011,
)
RESULT = TrainResult(
    policy_version=8,
    metrics={"real/two_sided": 0.5, "policy/grad_norm": 2.0},
    samples=(),
    warnings=("a step was skipped",),
)


def make_ticket(
    uid: str,
    rewards: tuple[float, ...],
    *,
    versions: tuple[int, int],
    lengths: tuple[int, ...],
    truncated: tuple[int, ...],
    seconds: tuple[float, float],
) -> RolloutTicket:
    sampled = SampledTicket(
        uid=uid,
        prompt_tokens=8,
        completion_tokens=lengths,
        truncated=tuple(index in truncated for index in range(len(rewards))),
        oldest_version=versions[0],
        newest_version=versions[1],
        seconds=seconds[0],
        generator="generator-0",
        ref=None,
    )
    return RolloutTicket(sampled=sampled, rewards=rewards, seconds=seconds[1], ref=None)


BATCH = [
    make_ticket(
        "a", (1.0, 0.0), versions=(5, 7), lengths=(9, 21), truncated=(1,), seconds=(2.0, 0.2)
    ),
    make_ticket(
        "b", (-0.5, 0.5), versions=(7, 7), lengths=(7, 3), truncated=(), seconds=(1.0, 0.1)
    ),
]


def metrics_of(batch: list[RolloutTicket], *, step_seconds: float = 4.0) -> dict[str, float]:
    return step_metrics(
        step=8,
        batch=batch,
        trained_version=7,
        result=RESULT,
        sync=SYNC,
        ready=3,
        left={
            Outcome.TRAINED: 14,
            Outcome.FILTERED: 5,
            Outcome.EVICTED: 1,
            Outcome.FAILED: 2,
        },
        times=StepTimes(
            began=99.75,
            saved=100.0,
            taken=100.5,
            trained=102.0,
            evaluated=102.25,
            ended=99.75 + step_seconds,
        ),
    )


def test_every_number_of_a_step() -> None:
    assert metrics_of(BATCH) == pytest.approx(
        {
            "step": 8,
            "policy_version": 8,
            "reward/mean": 0.25,
            "reward/max": 1.0,
            "reward/min": -0.5,
            "real/two_sided": 0.5,
            "policy/grad_norm": 2.0,
            "async/staleness_mean": 1.0,
            "async/staleness_max": 2,
            "async/in_flight_updates": 1,
            "async/buffer": 3,
            "async/filtered": 5,
            "async/evicted": 1,
            "async/failed": 2,
            "rollout/generators": 2,
            "rollout/tokens": 40,
            "rollout/truncated": 0.25,
            "sync/bytes": 269_000_000,
            "sync/probe_difference": 0.011,
            "time/generate": 1.5,
            "time/score": 0.15,
            "time/checkpoint": 0.25,
            "time/wait": 0.5,
            "time/train": 1.5,
            "time/evaluate": 0.25,
            "time/sync": 0.9,
            "time/pause": 0.7,
            "time/step": 4.0,
            "perf/tokens_per_second": 10.0,
        }
    )


def test_each_completion_counts_once_however_large_its_group_is() -> None:
    large = make_ticket(
        "c",
        (1.0,) * 6,
        versions=(7, 7),
        lengths=(10,) * 6,
        truncated=tuple(range(6)),
        seconds=(1.0, 0.1),
    )
    metrics = metrics_of([BATCH[0], large])
    assert metrics["reward/mean"] == 7 / 8
    assert metrics["rollout/truncated"] == 7 / 8


def test_numbers_are_plain() -> None:
    metrics = metrics_of(BATCH)
    assert all(type(value) in (int, float) for value in metrics.values())
    assert json.loads(json.dumps(metrics)) == metrics


def test_a_step_that_took_no_time_divides_by_nothing() -> None:
    metrics = metrics_of(BATCH, step_seconds=0.0)
    assert metrics["perf/tokens_per_second"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
