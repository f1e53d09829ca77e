"""The clipped importance-weighted loss of PPO, in log space."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from real_ray.loss.advantages import group_advantages
from real_ray.loss.base import GroupTable

# exp(20) is 5e8: far outside of every clip range, and its square still fits into float32.
MAX_LOG_RATIO = 20.0


def clipped_losses(
    log_ratios: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`` with ``r = exp(log_ratios)``.

    Source: PPO, arXiv 1707.06347, eq. 7. The formula does not bound r where A is negative: here
    log-ratios above `MAX_LOG_RATIO` are held there, without a gradient, so that nothing overflows.

    Args:
        log_ratios: any shape, finite.
        advantages: the same shape; a member with advantage 0 has loss 0 and gradient 0.

    Returns:
        Losses in the graph of ``log_ratios``, and where the clip is active (changes the minimum).
    """
    low, high = math.log1p(-epsilon), math.log1p(epsilon_high)
    clipped = ((advantages > 0) & (log_ratios > high)) | ((advantages < 0) & (log_ratios < low))
    # Bounded before exp: the gradient of a minimum of infinities would be 0 * inf.
    bounded = torch.where(
        advantages > 0, log_ratios.clamp_max(high), log_ratios.clamp(low, MAX_LOG_RATIO)
    )
    return -advantages * bounded.exp(), clipped


@torch.no_grad()
def unclipped_slopes(scores: Tensor, table: GroupTable) -> Tensor:
    """``-exp(s) A``, [G, N]: derivative by s of ``-r A`` if all ratios of a completion are exp(s).

    Where the advantage A is 0 the score may be anything.
    """
    advantages = group_advantages(table).to(scores.dtype)
    slopes = -advantages * scores.clamp_max(MAX_LOG_RATIO).exp()
    return slopes.masked_fill(advantages == 0, 0.0)
