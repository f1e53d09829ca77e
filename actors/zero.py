"""Optimiser steps of a DeepSpeed engine that leave no trace when the gradient is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of an optimiser step; the same on all ranks."""

    grad_norm: float  # of the whole gradient, before clipping; inf or nan: not finite
    applied: bool


def poison_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, with a gradient of NaN if the loss itself is not finite.

    An infinite loss can have a finite gradient. With this, whatever one rank finds in one
    micro-batch spreads to all ranks through the reduction of gradients, and `optimizer_step` skips
    the step everywhere: ranks need not agree on anything else. The gradient of a finite loss is
    unchanged to the bit, and the host does not wait for the device.

    Args:
        loss: scalar.
    """
    # Not torch.where on the loss: the branch that is not taken would make every gradient NaN.
    scale = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan).to(loss.dtype)
    return loss * scale


def optimizer_step(engine: Any) -> StepOutcome:
    """Clip and apply the accumulated gradient, or drop it if it is not finite; all ranks together.

    Call after the last backward pass, which must have been marked as the accumulation boundary.
    A dropped gradient changes no weight, no master weight, no state of the optimiser and no
    learning rate, and the next step is as if its backward passes had never been.

    Every optimiser that DeepSpeed wraps around a client's (ZeRO 1 to 3 at any precision; ZeRO 0 in
    bfloat16) takes a norm over all ranks, and if that is not finite clears gradients and
    accumulation buffers instead of stepping, and holds the learning rate back. What is left is
    ZeRO 0 in float32, where DeepSpeed calls the client's optimiser itself and checks nothing.

    Args:
        engine: a `DeepSpeedEngine` whose bf16.check_grad_overflow is not off.
    """
    if engine.optimizer is not engine.basic_optimizer:
        engine.step()
        return StepOutcome(
            grad_norm=float(engine.get_global_grad_norm()),
            applied=bool(engine.was_step_applied()),
        )
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    # Already reduced, hence the same on all ranks.
    norm = float(torch.nn.utils.get_total_norm(gradients))
    applied = math.isfinite(norm)
    if applied:
        engine.step()
    else:
        engine.zero_grad()
    return StepOutcome(grad_norm=norm, applied=applied)
