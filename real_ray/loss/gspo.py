"""`loss.type` gspo: one clipped ratio for each completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from real_ray.loss.advantages import group_advantages
from real_ray.loss.base import GroupTable, Members
from real_ray.loss.clipping import clipped_losses, unclipped_slopes
from real_ray.partial_metrics import PartialMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss:
    """Mean clipped loss of the included completions of the step; their ratio is ``exp(s)``.

    Source: GSPO, arXiv 2507.18071.

    Example: ``GspoLoss(epsilon=3e-4, epsilon_high=4e-4)``
    """

    epsilon: float
    epsilon_high: float

    couples_members: ClassVar[bool] = False

    def share(
        self, members: Members, table: GroupTable, scores: Tensor
    ) -> tuple[Tensor, PartialMetrics]:
        """See `PolicyLoss`. Metrics: ``loss/policy`` (share of the loss), ``loss/clip_fraction``.

        The clip fraction is of the included completions.
        """
        member_scores = members.scores()
        advantages = members.of(group_advantages(table))
        losses, clipped = clipped_losses(
            member_scores,
            advantages.to(member_scores.dtype),
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
        )
        share = losses.sum() / table.included.sum().clamp_min(1)
        num_included = float(members.of(table.included).sum())
        return share, PartialMetrics(
            totals={"loss/policy": float(share.detach())},
            means={"loss/clip_fraction": (float(clipped.sum()), num_included)},
        )

    def weights(self, scores: Tensor, table: GroupTable) -> Tensor:
        """``-exp(s) A * groups / included completions``."""
        num_included = table.included.sum().clamp_min(1)
        return unclipped_slopes(scores, table) * len(scores) / num_included
