"""The KL divergence from the reference model, a term of its own beside the policy loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from real_ray.errors import GroupError
from real_ray.loss.clipping import MAX_LOG_RATIO
from real_ray.partial_metrics import PartialMetrics


def kl_share(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, num_tokens: int
) -> tuple[Tensor, PartialMetrics]:
    """Share of some tokens in the mean k3 estimate of KL(policy || reference) over the step.

    ``sum of (exp(d) - 1 - d) / num_tokens`` with ``d = reference - policy`` log-prob of a token.
    The shares of all parts of a step add up to the mean. Above d = 20 the estimate goes on along
    its tangent, so that float32 does not overflow.
    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: [T] of the policy; the only input that gets a gradient.
        reference_logprobs: [T] of the reference model.
        mask: [T] bool, the tokens that count: those of included members, whether or not their
            groups are two-sided. The tokens of excluded members do not count.
        num_tokens: tokens that count in the WHOLE step.

    Returns:
        Scalar in the graph of ``logprobs``, 0 with gradient 0 if no token counts; and the metric
        ``policy/kl`` of these tokens, in nats per token.

    Raises:
        GroupError: the shapes differ.
    """
    if not logprobs.shape == reference_logprobs.shape == mask.shape:
        raise GroupError(
            f"log-probs of shape {tuple(logprobs.shape)}, reference log-probs of shape "
            f"{tuple(reference_logprobs.shape)} and a mask of shape {tuple(mask.shape)}: "
            "all three must be [tokens] of the same members"
        )
    count = int(mask.sum())
    assert count <= num_tokens, f"{count} tokens in a part of a step of {num_tokens}"
    difference = (reference_logprobs.detach() - logprobs).masked_fill(~mask, 0.0)
    bounded = difference.clamp_max(MAX_LOG_RATIO)
    beyond = (difference - MAX_LOG_RATIO).relu() * math.expm1(MAX_LOG_RATIO)
    total = (torch.expm1(bounded) - bounded + beyond).sum()
    return total / max(num_tokens, 1), PartialMetrics(
        means={"policy/kl": (float(total.detach()), float(count))}
    )
