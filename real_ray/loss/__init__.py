"""Losses: pure functions of named tensors. Importing this package imports torch."""

from real_ray.loss.base import GroupTable, Members, PolicyLoss
from real_ray.loss.build import build_loss
from real_ray.loss.classes import labels, two_sided
from real_ray.loss.kl import kl_share
from real_ray.loss.real import group_loss, group_weights
from real_ray.loss.stats import real_metrics

__all__ = [
    "GroupTable",
    "Members",
    "PolicyLoss",
    "build_loss",
    "group_loss",
    "group_weights",
    "kl_share",
    "labels",
    "real_metrics",
    "two_sided",
]
