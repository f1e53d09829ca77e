"""The REAL loss of whole groups, as pure functions of named tensors.

REAL reads the rewards of a group as class labels and the scores of its completions as logits.
Source: "Rewards as Labels: Revisiting RLVR from a Classification Perspective",
arXiv 2602.05630, eq. 8.

Shapes: ``G`` groups of ``N`` members. Arithmetic and results are float32, or float64 if the
scores are.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from real_ray.errors import GroupError, RewardError


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


def two_sided(positive: Tensor, included: Tensor | None = None) -> Tensor:
    """Which groups have at least one positive and one negative among their included members.

    Args:
        positive: [G, N] bool or 0/1.
        included: [G, N] bool or 0/1; all members if not given.

    Returns:
        [G] bool.

    Raises:
        GroupError: the shapes differ, are not [G, N], or N is below 2.
        ValueError: a label is neither 0 nor 1.
    """
    positives, negatives = _classes(positive, included)
    return positives.any(dim=1) & negatives.any(dim=1)


def count_groups(two_sided: Tensor, group_denominator: Literal["all", "valid"]) -> int:
    """Groups that the batch loss is averaged over, in the part of the batch that is given.

    The counts of parts of a batch add up to the count of the batch, which is what `batch_loss`
    needs.

    Args:
        two_sided: [G] bool, from `two_sided`.
        group_denominator: ``all`` groups, or only the ``valid`` (two-sided) ones.
    """
    if group_denominator == "all":
        return two_sided.numel()
    if group_denominator == "valid":
        return int(two_sided.sum())
    raise ValueError(f"group_denominator is {group_denominator!r}: use 'all' or 'valid'")


def batch_loss(group_losses: Tensor, num_groups: int) -> Tensor:
    """Share of the given groups in the mean loss of the batch.

    The shares of all parts of a batch (micro-batches, ranks) add up to the loss of the batch.

    Args:
        group_losses: [G] losses of the groups in this part.
        num_groups: `count_groups` summed over the WHOLE batch. With 0, when no group is valid,
            every loss is 0, and so is the result; backward works.

    Returns:
        Scalar in the graph of ``group_losses``.
    """
    if num_groups < 0:
        raise ValueError(f"num_groups is {num_groups}: it must not be negative")
    return group_losses.sum() / max(num_groups, 1)


def labels(rewards: Tensor, positive_above: float) -> Tensor:
    """Label of each member: positive if its reward is above ``positive_above``.

    Args:
        rewards: [G, N].

    Returns:
        [G, N] bool.

    Raises:
        GroupError: the shape is not [G, N] with N of at least 2.
        RewardError: a reward is not finite; names its group (row) and member.
    """
    _check_shape("rewards", rewards)
    bad = torch.nonzero(~torch.isfinite(rewards))
    if len(bad):
        row, member = bad[0].tolist()
        raise RewardError(
            f"reward of member {member} of group {row} in the batch is "
            f"{rewards[row, member].item()}: the reward function must return a finite number"
        )
    return rewards > positive_above


def _two_classes(
    scores: Tensor, positive: Tensor, tau: float, included: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Checked logits s / tau and class masks; both masks are empty where a group is one-sided."""
    if not (tau > 0 and math.isfinite(tau)):
        raise ValueError(f"tau is {tau}: it must be a finite number above 0")
    if not scores.is_floating_point():
        raise ValueError(f"scores has dtype {scores.dtype}: it must be floating point")
    _check_same_shape("scores", scores, "positive", positive)
    positives, negatives = _classes(positive, included)
    valid = two_sided(positives, positives | negatives).unsqueeze(1)
    logits = scores.to(torch.promote_types(scores.dtype, torch.float32)) / tau
    return logits, positives & valid, negatives & valid


def _classes(positive: Tensor, included: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_shape("positive", positive)
    is_positive = _as_bool("positive", positive)
    if included is None:
        return is_positive, ~is_positive
    _check_same_shape("positive", positive, "included", included)
    is_included = _as_bool("included", included)
    return is_positive & is_included, ~is_positive & is_included


def _join_zero(logits: Tensor, members: Tensor) -> Tensor:
    """[G, N + 1]: logits of the members of a class, -inf for others, and the 0 of the "1 +".

    The constant keeps every maximum finite, so that an empty class has gradient 0, not NaN.
    """
    return torch.cat(
        [logits.masked_fill(~members, -math.inf), logits.new_zeros(len(logits), 1)], dim=1
    )


def _check_shape(name: str, values: Tensor) -> None:
    if values.ndim != 2 or values.shape[1] < 2:
        raise GroupError(
            f"the shape of {name} is {tuple(values.shape)}: expected [groups, num_generations] "
            "with num_generations of at least 2"
        )


def _check_same_shape(name: str, values: Tensor, other_name: str, other: Tensor) -> None:
    if values.shape != other.shape:
        raise GroupError(
            f"the shape of {name} is {tuple(values.shape)} but that of {other_name} is "
            f"{tuple(other.shape)}: both must be [groups, num_generations] of the same groups"
        )


def _as_bool(name: str, values: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        return values
    if values.is_floating_point() or values.is_complex():
        raise ValueError(f"{name} has dtype {values.dtype}: use bool, or integers 0 and 1")
    bad = values[(values != 0) & (values != 1)]
    if len(bad):
        raise ValueError(f"{name} has the value {int(bad[0])}: use bool, or integers 0 and 1")
    return values.bool()
