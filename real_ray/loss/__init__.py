"""Losses: pure functions of named tensors. Importing this package imports torch."""

from real_ray.loss.real import (
    batch_loss,
    count_groups,
    group_loss,
    group_weights,
    labels,
    two_sided,
)
from real_ray.loss.stats import real_metrics

__all__ = [
    "batch_loss",
    "count_groups",
    "group_loss",
    "group_weights",
    "labels",
    "real_metrics",
    "two_sided",
]
