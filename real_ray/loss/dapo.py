"""`loss.type` dapo: clipped token ratios, averaged over all tokens of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from real_ray.loss.base import GroupTable, Members
from real_ray.loss.clipping import unclipped_slopes
from real_ray.loss.grpo import token_losses
from real_ray.partial_metrics import PartialMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoLoss:
    """Mean loss of the tokens of the included completions of the step.

    Source: DAPO, arXiv 2503.14476: its token mean and its higher upper clip, without its dynamic
    sampling and overlong reward shaping, which are no part of the loss.

    Example: ``DapoLoss(epsilon=0.2, epsilon_high=0.28)``
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
        share = losses.sum() / _included_tokens(table).sum().clamp_min(1)
        policy = PartialMetrics(totals={"loss/policy": float(share.detach())})
        return share, PartialMetrics.merge([policy, metrics])

    def weights(self, scores: Tensor, table: GroupTable) -> Tensor:
        """``-exp(s) A * groups * tokens / all tokens``, as if all tokens had the ratio exp(s)."""
        num_tokens = _included_tokens(table)
        slopes = unclipped_slopes(scores, table) * num_tokens
        return slopes * len(scores) / num_tokens.sum().clamp_min(1)


def _included_tokens(table: GroupTable) -> Tensor:
    """[G, N] completion tokens, 0 for excluded members."""
    return table.num_tokens.masked_fill(~table.included, 0)
