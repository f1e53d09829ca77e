"""Metrics of the REAL loss."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from real_ray.loss.real import batch_loss, group_loss, group_weights, two_sided
from real_ray.partial_metrics import PartialMetrics


def real_metrics(
    scores: Tensor,
    positive: Tensor,
    tau: float,
    included: Tensor | None = None,
    *,
    num_groups: int,
) -> PartialMetrics:
    """Metrics of the given groups. Excluded members count in none of them.

    ``real/loss`` (share in the batch loss), ``real/two_sided`` (fraction of the groups),
    ``real/score_pos``, ``real/score_neg`` (mean scores of the classes), ``real/score_min``,
    ``real/score_max``, ``real/weight_abs`` (mean |dL/ds|, one-sided groups included).

    Args:
        num_groups: denominator of the loss of the WHOLE batch, as for `batch_loss`.

    The other arguments, and the errors, are those of `group_loss`.
    """
    scores = scores.detach()
    weights = _numpy(group_weights(scores, positive, tau, included))
    loss = batch_loss(group_loss(scores, positive, tau, included), num_groups)
    valid = _numpy(two_sided(positive, included))
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
            "real/two_sided": mean(valid),
            "real/score_pos": mean(s[is_positive & is_included]),
            "real/score_neg": mean(s[~is_positive & is_included]),
            "real/weight_abs": mean(np.abs(weights[is_included])),
        },
        minima={"real/score_min": float(s[is_included].min(initial=np.inf))},
        maxima={"real/score_max": float(s[is_included].max(initial=-np.inf))},
    )


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().double().numpy()
