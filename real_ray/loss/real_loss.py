"""`loss.type` real: the REAL loss as a `PolicyLoss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from real_ray.loss.base import GroupTable, Members
from real_ray.loss.classes import count_groups, labels, two_sided
from real_ray.loss.real import group_weights
from real_ray.partial_metrics import PartialMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RealLoss:
    """Mean of `group_loss` over the groups of the step (arXiv 2602.05630, eq. 8).

    A share is ``sum over its members of w s / groups``, with ``w`` from `group_weights`: it has
    the gradient of the loss, not its value, which `real_metrics` reports for the whole step.

    Example: ``RealLoss(tau=0.5, label_mode="threshold", positive_above=0.0,
    group_denominator="all")``
    """

    tau: float
    label_mode: Literal["threshold", "group_mean"]
    positive_above: float
    group_denominator: Literal["all", "valid"]

    couples_members: ClassVar[bool] = True

    def share(
        self, members: Members, table: GroupTable, scores: Tensor
    ) -> tuple[Tensor, PartialMetrics]:
        """See `PolicyLoss`."""
        sided = two_sided(self._labels(table), table.included)
        num_groups = max(count_groups(sided, self.group_denominator), 1)
        weights = members.of(self.weights(scores, table))
        return (weights * members.scores()).sum() / num_groups, PartialMetrics()

    def weights(self, scores: Tensor, table: GroupTable) -> Tensor:
        """``group_weights(scores)``; the number of groups is that of ``group_denominator``."""
        return group_weights(scores, self._labels(table), self.tau, table.included)

    def _labels(self, table: GroupTable) -> Tensor:
        return labels(
            table.rewards,
            mode=self.label_mode,
            positive_above=self.positive_above,
            included=table.included,
        )
