"""`loss.type` real_bce: binary cross-entropy, the classification loss that REAL builds on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from real_ray.loss.base import GroupTable, Members
from real_ray.loss.classes import labels, two_sided
from real_ray.partial_metrics import PartialMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RealBceLoss:
    """Mean over the included completions of two-sided groups of the cross-entropy of one label.

    ``log(1 + exp(-s / tau))`` for a positive and ``log(1 + exp(s / tau))`` for a negative: REAL
    without the competition of the members of a class.

    Example: ``RealBceLoss(tau=0.5, label_mode="threshold", positive_above=0.0)``
    """

    tau: float
    label_mode: Literal["threshold", "group_mean"]
    positive_above: float

    couples_members: ClassVar[bool] = False

    def share(
        self, members: Members, table: GroupTable, scores: Tensor
    ) -> tuple[Tensor, PartialMetrics]:
        """See `PolicyLoss`. The metric is ``loss/policy``, the share of the loss."""
        positive, counts = self._targets(table)
        member_scores = members.scores()
        losses = binary_cross_entropy_with_logits(
            member_scores / self.tau,
            members.of(positive).to(member_scores.dtype),
            reduction="none",
        )
        share = (losses * members.of(counts)).sum() / counts.sum().clamp_min(1)
        return share, PartialMetrics(totals={"loss/policy": float(share.detach())})

    @torch.no_grad()
    def weights(self, scores: Tensor, table: GroupTable) -> Tensor:
        """``(sigmoid(s / tau) - label) / tau * groups / completions that count``."""
        positive, counts = self._targets(table)
        slopes = (torch.sigmoid(scores / self.tau) - positive.to(scores.dtype)) / self.tau
        return slopes.masked_fill(~counts, 0.0) * len(scores) / counts.sum().clamp_min(1)

    def _targets(self, table: GroupTable) -> tuple[Tensor, Tensor]:
        """Labels, and which members count, each [G, N] bool."""
        positive = labels(
            table.rewards,
            mode=self.label_mode,
            positive_above=self.positive_above,
            included=table.included,
        )
        sided = two_sided(positive, table.included)
        return positive, table.included & sided.unsqueeze(1)
