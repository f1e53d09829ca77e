"""What is recorded of each step, under which name. docs/metrics.md explains the names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from real_ray.ledger import Outcome
from real_ray.types import RolloutTicket, SyncReport, TrainResult


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """When the parts of a step were done, in seconds of one clock."""

    began: float  # the end of the step before
    saved: float  # its checkpoint, if there was one to save, was complete
    taken: float = 0.0  # the batch was complete
    trained: float = 0.0
    evaluated: float = 0.0  # no evaluation of the old weights runs any more
    ended: float = 0.0  # the new weights are in the generators


def step_metrics(
    *,
    step: int,
    batch: Sequence[RolloutTicket],
    trained_version: int,
    result: TrainResult,
    sync: SyncReport,
    ready: int,
    left: Mapping[Outcome, int],
    times: StepTimes,
) -> dict[str, float]:
    """One object of `metrics.jsonl`: plain numbers by name, times in seconds.

    Args:
        trained_version: version of the policy that the batch was trained on, before the step.
        ready: complete groups that wait for the next step.
        left: groups that have left the pipeline since the run began, by how.
    """
    rewards = [reward for group in batch for reward in group.rewards]
    sampled = [group.sampled for group in batch]
    staleness = [trained_version - group.oldest_version for group in sampled]
    tokens = sum(group.num_tokens for group in sampled)
    seconds = times.ended - times.began
    return {
        "step": step,
        "policy_version": result.policy_version,
        "reward/mean": fmean(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        **result.metrics,
        "async/staleness_mean": fmean(staleness),
        "async/staleness_max": max(staleness),
        "async/in_flight_updates": sum(g.newest_version > g.oldest_version for g in sampled),
        "async/buffer": ready,
        "async/filtered": left[Outcome.FILTERED],
        "async/evicted": left[Outcome.EVICTED],
        "async/failed": left[Outcome.FAILED],
        "rollout/generators": sync.num_generators,
        "rollout/tokens": tokens,
        "rollout/truncated": sum(sum(g.truncated) for g in sampled) / len(rewards),
        "sync/bytes": sync.num_bytes,
        "sync/probe_difference": sync.probe_difference,
        "time/generate": fmean(group.seconds for group in sampled),
        "time/score": fmean(group.seconds for group in batch),
        "time/checkpoint": times.saved - times.began,
        "time/wait": times.taken - times.saved,
        "time/train": times.trained - times.taken,
        "time/evaluate": times.evaluated - times.trained,
        "time/sync": sync.seconds,
        "time/pause": sync.pause_seconds,
        "time/step": seconds,
        "perf/tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
    }
