"""What is recorded of each step, under which name. docs/metrics.md explains the names."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from real_ray.types import RolloutTicket, SyncReport, TrainResult


def step_metrics(
    *,
    step: int,
    batch: Sequence[RolloutTicket],
    trained_version: int,
    result: TrainResult,
    sync: SyncReport,
    ready: int,
    failed: int,
    wait_seconds: float,
    train_seconds: float,
    step_seconds: float,
) -> dict[str, float]:
    """One object of `metrics.jsonl`: plain numbers by name, times in seconds.

    Args:
        trained_version: version of the policy that the batch was trained on, before the step.
        ready: complete groups that wait for the next step.
        failed: groups that failed since the run began.
    """
    rewards = [reward for group in batch for reward in group.rewards]
    sampled = [group.sampled for group in batch]
    staleness = [trained_version - group.oldest_version for group in sampled]
    tokens = sum(group.num_tokens for group in sampled)
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
        "async/failed": failed,
        "rollout/tokens": tokens,
        "rollout/truncated": sum(sum(g.truncated) for g in sampled) / len(rewards),
        "sync/bytes": sync.num_bytes,
        "sync/probe_difference": sync.probe_difference,
        "time/generate": fmean(group.seconds for group in sampled),
        "time/score": fmean(group.seconds for group in batch),
        "time/wait": wait_seconds,
        "time/train": train_seconds,
        "time/sync": sync.seconds,
        "time/pause": sync.pause_seconds,
        "time/step": step_seconds,
        "perf/tokens_per_second": tokens / step_seconds if step_seconds > 0 else 0.0,
    }
