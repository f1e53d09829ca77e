"""Metrics of the REAL loss."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from real_ray.loss.classes import count_groups, two_sided
from real_ray.loss.real import group_loss, group_weights
from real_ray.partial_metrics import PartialMetrics


def real_metrics(
    scores: Tensor,
    positive: Tensor,
    tau: float,
    included: Tensor | None = None,
    *,
    group_denominator: Literal["all", "valid"] = "all",
) -> PartialMetrics:
    """Metrics of ALL groups of an optimiser step. Excluded members count in none of them.

    ``real/loss`` (mean over the groups of ``group_denominator``), ``real/two_sided`` (fraction of
    all groups), ``real/score_pos``, ``real/score_neg`` (mean scores of the classes),
    ``real/score_min``, ``real/score_max``, ``real/weight_abs`` (mean |dL/ds|, one-sided groups
    included). Whatever the loss of the run, they describe REAL on its groups.

    The other arguments, and the errors, are those of `group_loss`.
    """
    scores = scores.detach()
    weights = _numpy(group_weights(scores, positive, tau, included))
    sided = two_sided(positive, included)
    num_groups = max(count_groups(sided, group_denominator), 1)
    loss = group_loss(scores, positive, tau, included).sum() / num_groups
    is_included = (
        np.ones(scores.shape, dtype=bool) if included is None else _numpy(included).astype(bool)
    )
    is_positive = _numpy(positive).astype(bool)
    s = _numpy(scores)

    def mean(values: np.ndarray) -> tuple[float, float]:
        return float(values.sum()), float(values.size)

    return PartialMetrics(
        totals={"real/loss": float(loss)},
        means={
            "real/two_sided": mean(_numpy(sided)),
            "real/score_pos": mean(s[is_positive & is_included]),
            "real/score_neg": mean(s[~is_positive & is_included]),
            "real/weight_abs": mean(np.abs(weights[is_included])),
        },
        minima={"real/score_min": float(s[is_included].min(initial=np.inf))},
        maxima={"real/score_max": float(s[is_included].max(initial=-np.inf))},
    )


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().double().numpy()
