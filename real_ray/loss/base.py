"""What every loss is given, and what it gives back.

Shapes: ``G`` groups of ``N`` members in an optimiser step; ``M`` of these members in a
micro-batch, with ``T`` completion tokens together, one member after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from real_ray.partial_metrics import PartialMetrics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTable:
    """All groups of an optimiser step, as far as they are known before the policy is asked.

    Every rank has the same table, so each knows the denominators of the whole step.

    Example: ``GroupTable(rewards=torch.tensor([[1.0, 0.0]]), included=torch.tensor([[True, True]]),
    num_tokens=torch.tensor([[3, 5]]))``
    """

    rewards: Tensor  # [G, N] float32
    included: Tensor  # [G, N] bool; an excluded member has no influence on anything
    num_tokens: Tensor  # [G, N] int64, completion tokens of each member, at least 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """Some members of the groups, with the log-probs of their completion tokens."""

    logprobs: Tensor  # [T] of the policy; the only one with a graph
    old_logprobs: Tensor  # [T] of pi_old
    row: Tensor  # [T] int64, the member (0 .. M - 1) that a token belongs to
    group: Tensor  # [M] int64, row of the `GroupTable`
    index: Tensor  # [M] int64, column of the `GroupTable`

    def sum(self, values: Tensor) -> Tensor:
        """[T] values of tokens, summed over each member: [M]."""
        return values.new_zeros(len(self.group)).index_add(0, self.row, values)

    def mean(self, values: Tensor) -> Tensor:
        """[T] values of tokens, averaged over each member: [M]."""
        return self.sum(values) / torch.bincount(self.row, minlength=len(self.group)).clamp_min(1)

    def scores(self) -> Tensor:
        """[M] mean log-ratio of each member's tokens (s of arXiv 2602.05630), with a graph."""
        return self.mean(self.logprobs - self.old_logprobs.detach())

    def of(self, table: Tensor) -> Tensor:
        """[G, N] values of a table for each of these members: [M]."""
        return table[self.group, self.index]


class PolicyLoss(Protocol):
    """A loss over whole groups that can be computed in parts.

    The shares of all parts of an optimiser step (micro-batches, ranks) have, together, the
    gradient of the loss of the whole step on one process.
    """

    @property
    def couples_members(self) -> bool:
        """Whether the gradient of a member depends on the scores of the rest of its group."""
        ...

    def share(
        self, members: Members, table: GroupTable, scores: Tensor
    ) -> tuple[Tensor, PartialMetrics]:
        """Share of these members in the gradient of the step.

        Args:
            scores: [G, N] without a graph, under the current policy. Used only if
                `couples_members`, and only in the rows of the groups of ``members``; any values
                of this shape do elsewhere.

        Returns:
            A scalar in the graph of ``members.logprobs``, whose gradient is the share (its value
            need not be the loss), and metrics of these members.
        """
        ...

    def weights(self, scores: Tensor, table: GroupTable) -> Tensor:
        """[G, N] derivative of the loss of the step, times its number of groups, by the score.

        A loss with ratios gives the derivative without its clipping. Excluded members have 0,
        whatever their scores. The result has no graph.
        """
        ...
