"""`loss.type` grpo: clipped token ratios, averaged over each completion first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from real_ray.loss.advantages import group_advantages
from real_ray.loss.base import GroupTable, Members
from real_ray.loss.clipping import clipped_losses, unclipped_slopes
from real_ray.partial_metrics import PartialMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoLoss:
    """Mean over the included completions of the step of the mean loss of their tokens.

    Source: GRPO, arXiv 2402.03300, eq. 3, without its KL term (see `kl_share`).

    Example: ``GrpoLoss(epsilon=0.2, epsilon_high=0.2)``
    """

    epsilon: float
    epsilon_high: float

    couples_members: ClassVar[bool] = False

    def share(
        self, members: Members, table: GroupTable, scores: Tensor
    ) -> tuple[Tensor, PartialMetrics]:
        """See `PolicyLoss`. Metrics: ``loss/policy`` (share of the loss), ``loss/clip_fraction``.

        The clip fraction is of the included tokens.
        """
        losses, metrics = token_losses(members, table, self.epsilon, self.epsilon_high)
        share = members.mean(losses).sum() / table.included.sum().clamp_min(1)
        policy = PartialMetrics(totals={"loss/policy": float(share.detach())})
        return share, PartialMetrics.merge([policy, metrics])

    def weights(self, scores: Tensor, table: GroupTable) -> Tensor:
        """``-exp(s) A * groups / included completions``, as if all tokens had the ratio exp(s)."""
        num_included = table.included.sum().clamp_min(1)
        return unclipped_slopes(scores, table) * len(scores) / num_included


def token_losses(
    members: Members, table: GroupTable, epsilon: float, epsilon_high: float
) -> tuple[Tensor, PartialMetrics]:
    """Clipped loss of each token, [T], 0 for excluded members; and ``loss/clip_fraction``."""
    advantages = members.of(group_advantages(table))[members.row]
    losses, clipped = clipped_losses(
        members.logprobs - members.old_logprobs.detach(),
        advantages.to(members.logprobs.dtype),
        epsilon=epsilon,
        epsilon_high=epsilon_high,
    )
    num_tokens = members.of(table.included)[members.row].sum()
    fraction = {"loss/clip_fraction": (float(clipped.sum()), float(num_tokens))}
    return losses, PartialMetrics(means=fraction)
