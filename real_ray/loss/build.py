"""From `loss.type` to a loss."""

from __future__ import annotations

from real_ray.config import LossConfig
from real_ray.loss.base import PolicyLoss
from real_ray.loss.dapo import DapoLoss
from real_ray.loss.grpo import GrpoLoss
from real_ray.loss.gspo import GspoLoss
from real_ray.loss.real_bce import RealBceLoss
from real_ray.loss.real_loss import RealLoss


def build_loss(config: LossConfig) -> PolicyLoss:
    """The loss of a run. Where a clip range is null it is that of the paper."""
    match config.type:
        case "real":
            return RealLoss(
                tau=config.tau,
                label_mode=config.labels,
                positive_above=config.positive_above,
                group_denominator=config.group_denominator,
            )
        case "real_bce":
            return RealBceLoss(
                tau=config.tau,
                label_mode=config.labels,
                positive_above=config.positive_above,
            )
        case "grpo":
            epsilon = _given(config.epsilon, 0.2)
            return GrpoLoss(epsilon=epsilon, epsilon_high=_given(config.epsilon_high, epsilon))
        case "dapo":
            return DapoLoss(
                epsilon=_given(config.epsilon, 0.2),
                epsilon_high=_given(config.epsilon_high, 0.28),
            )
        case "gspo":
            return GspoLoss(
                epsilon=_given(config.epsilon, 3e-4),
                epsilon_high=_given(config.epsilon_high, 4e-4),
            )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
