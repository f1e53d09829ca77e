"""Gradients of all losses from their formulas: one process, one sequence at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_ranks import TEMPERATURE
from recording_learner import Gradients

from real_ray.config import LossConfig
from real_ray.types import RolloutGroup


def load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def token_logprobs(policy: Any, groups: Sequence[RolloutGroup]) -> list[list[torch.Tensor]]:
    """Each completion alone, unpadded, in float64."""

    def of(prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
        ids = torch.tensor(np.concatenate([prompt, completion]))[None].long()
        logprobs = (policy(input_ids=ids).logits[0] / TEMPERATURE).log_softmax(-1)
        return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]

    return [
        [of(g.sampled.prompt.token_ids, c.token_ids) for c in g.sampled.completions] for g in groups
    ]


def real(scores: list[torch.Tensor], positive: list[bool], tau: float) -> torch.Tensor:
    """The loss of a group, written out."""
    if len(set(positive)) < 2:
        return 0.0 * sum(scores)
    pull = [torch.exp(-s / tau) for s, p in zip(scores, positive, strict=True) if p]
    push = [torch.exp(s / tau) for s, p in zip(scores, positive, strict=True) if not p]
    return torch.log(1 + sum(pull)) + torch.log(1 + sum(push))


def reference(
    policy: Any, groups: Sequence[RolloutGroup], loss: LossConfig, start: Any = None
) -> Gradients:
    """The gradient of one optimiser step, from the formulas.

    Args:
        start: the policy at the start of the batch and the reference of the KL term, if it is
            another one.
    """
    logprobs = token_logprobs(policy, groups)
    with torch.no_grad():
        at_start = token_logprobs(start or policy, groups)
    policy.zero_grad()
    parts: list[torch.Tensor] = []
    sided = tokens = sequences = 0
    kl = torch.zeros((), dtype=torch.float64)
    for group, of_group, of_start in zip(groups, logprobs, at_start, strict=True):
        kept = []
        for lp, first, c, reward in zip(
            of_group, of_start, group.sampled.completions, group.rewards, strict=True
        ):
            if loss.truncated == "exclude" and c.finish_reason == "length":
                continue
            behaviour = torch.tensor(c.generator_logprobs).double()
            share = {"behaviour": 1.0, "proximal": 0.0, "blend": loss.blend_lambda}
            of_mismatch = share[loss.old_logprobs]
            kept.append((lp - first + of_mismatch * (first - behaviour), float(reward)))
            k3 = (first - lp).exp() - 1 - (first - lp)
            kl, tokens = kl + k3.sum(), tokens + len(lp)
        rewards = [r for _, r in kept]
        mean = sum(rewards) / len(rewards)
        std = float(np.std(rewards, ddof=1))
        bound = 0.0 if loss.labels == "threshold" else mean
        positive = [r > bound for r in rewards]
        sided += len(set(positive)) == 2
        sequences += len(kept)
        if loss.type == "real":
            parts.append(real([ratio.mean() for ratio, _ in kept], positive, loss.tau))
            continue
        for ratio, reward in kept:
            advantage = (reward - mean) / (std + 1e-4)
            if loss.type in ("grpo", "dapo"):
                high = 0.2 if loss.type == "grpo" else 0.28
                r = ratio.exp()
                per_token = -torch.minimum(r * advantage, r.clamp(0.8, 1 + high) * advantage)
                parts.append(per_token.mean() if loss.type == "grpo" else per_token.sum())
            elif loss.type == "gspo":
                r = ratio.mean().exp()
                parts.append(-torch.minimum(r * advantage, r.clamp(1 - 3e-4, 1 + 4e-4) * advantage))
            elif len(set(positive)) == 2:  # real_bce
                sign = 1.0 if reward > bound else -1.0
                parts.append(torch.log(1 + torch.exp(-sign * ratio.mean() / loss.tau)))
    denominator = {
        "real": len(groups) if loss.group_denominator == "all" else sided,
        "grpo": sequences,
        "dapo": tokens,
        "gspo": sequences,
        "real_bce": len(parts),
    }[loss.type]
    (sum(parts) / denominator + loss.beta * kl / tokens).backward()
    return {name: p.grad.numpy() for name, p in policy.named_parameters()}


def assert_equal(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-3, atol=4e-6 * scale, err_msg=name)
