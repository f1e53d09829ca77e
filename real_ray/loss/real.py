"""The REAL loss of whole groups, as pure functions of named tensors.

REAL reads the rewards of a group as class labels and the scores of its completions as logits.
Source: "Rewards as Labels: Revisiting RLVR from a Classification Perspective",
arXiv 2602.05630, eq. 8.

Shapes: ``G`` groups of ``N`` members. Arithmetic and results are float32, or float64 if the
scores are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from real_ray.loss.checks import check_same_groups
from real_ray.loss.classes import split_classes, two_sided


def group_loss(
    scores: Tensor, positive: Tensor, tau: float, included: Tensor | None = None
) -> Tensor:
    """REAL loss of each group (arXiv 2602.05630, eq. 8).

    ``log(1 + sum over positives of exp(-s / tau)) + log(1 + sum over negatives of exp(s / tau))``

    A group that has only positives or only negatives contributes exactly 0 with gradient 0. An
    excluded member belongs to neither class, whatever its score and label.

    Args:
        scores: [G, N] mean log-ratio of the completion tokens of each member.
        positive: [G, N] bool or 0/1, the labels.
        tau: temperature of the classification, above 0.
        included: [G, N] bool or 0/1; all members if not given.

    Returns:
        [G] losses, in the graph of ``scores``.

    Raises:
        GroupError: the shapes differ, are not [G, N], or N is below 2.
        ValueError: ``tau``, the dtype of the scores, or a label is out of its domain.
    """
    logits, positives, negatives = _two_classes(scores, positive, tau, included)
    losses: Tensor = torch.logsumexp(_join_zero(-logits, positives), dim=1) + torch.logsumexp(
        _join_zero(logits, negatives), dim=1
    )
    return losses


@torch.no_grad()
def group_weights(
    scores: Tensor, positive: Tensor, tau: float, included: Tensor | None = None
) -> Tensor:
    """Gradient of `group_loss` with respect to the scores, in closed form.

    ``-(1 / tau) exp(-s / tau) / (1 + sum over positives of exp(-s / tau))`` for a positive and
    ``+(1 / tau) exp(+s / tau) / (1 + sum over negatives of exp(+s / tau))`` for a negative
    (the derivative of arXiv 2602.05630, eq. 8); 0 for an excluded member and in a group with one
    class only. Backward through ``(group_weights(s) * s).sum()`` therefore gives the gradient of
    ``group_loss(s).sum()``, however the members are split over micro-batches and ranks.

    Takes the arguments of `group_loss` and raises the same errors.

    Returns:
        [G, N] weights dL/ds without a graph. Each class sums to less than 1 / tau in magnitude.
    """
    logits, positives, negatives = _two_classes(scores, positive, tau, included)
    pull = torch.softmax(_join_zero(-logits, positives), dim=1)[:, :-1]
    push = torch.softmax(_join_zero(logits, negatives), dim=1)[:, :-1]
    return (push - pull) / tau


def _two_classes(
    scores: Tensor, positive: Tensor, tau: float, included: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Checked logits s / tau and class masks; both masks are empty where a group is one-sided."""
    if not (tau > 0 and math.isfinite(tau)):
        raise ValueError(f"tau is {tau}: it must be a finite number above 0")
    if not scores.is_floating_point():
        raise ValueError(f"scores has dtype {scores.dtype}: it must be floating point")
    check_same_groups("scores", scores, "positive", positive)
    positives, negatives = split_classes(positive, included)
    valid = two_sided(positives, positives | negatives).unsqueeze(1)
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32)) / tau
    return logits, positives & valid, negatives & valid


def _join_zero(logits: Tensor, members: Tensor) -> Tensor:
    """[G, N + 1]: logits of the members of a class, -inf for others, and the 0 of the "1 +".

    The constant keeps every maximum finite, so that an empty class has gradient 0, not NaN.
    """
    return torch.cat(
        [logits.masked_fill(~members, -math.inf), logits.new_zeros(len(logits), 1)], dim=1
    )
