"""The optimiser of the learner, and its learning rate over the run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from actors.protocol import LearnerSpec
from real_ray.config import LearnerConfig


def build_optimizer(policy: nn.Module, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained; weight decay on matrices only.

    torch's AdamW needs no compiler at run time, unlike DeepSpeed's own.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]  # biases and norms
    groups: list[dict[str, Any]] = [{"params": trained}]
    if config.weight_decay:
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, spec: LearnerSpec
) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up over `warmup_ratio` of the steps, then `lr_schedule` to the last step."""
    warmup = math.ceil(spec.config.warmup_ratio * spec.num_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, spec.num_steps - warmup)
        match spec.config.lr_schedule:
            case "constant":
                return 1.0
            case "linear":
                return max(0.0, 1.0 - done)
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
