"""What `build_loss` makes of the section `loss`, seen through the loss that it builds."""

from __future__ import annotations

import math

import pytest
from loss_steps import Step, flat, gradient, policy_share

from real_ray.config import LossConfig
from real_ray.loss import build_loss


class TestBuild:
    @pytest.mark.parametrize(
        ("config", "low", "high"),
        [
            ({"type": "grpo"}, 0.2, 0.2),
            ({"type": "grpo", "epsilon": 0.1}, 0.1, 0.1),
            ({"type": "grpo", "epsilon_high": 0.3}, 0.2, 0.3),
            ({"type": "dapo"}, 0.2, 0.28),
            ({"type": "dapo", "epsilon": 0.1, "epsilon_high": 0.4}, 0.1, 0.4),
            ({"type": "gspo"}, 3e-4, 4e-4),
            ({"type": "gspo", "epsilon": 1e-3, "epsilon_high": 2e-3}, 1e-3, 2e-3),
        ],
    )
    def test_clip_ranges(self, config: dict[str, object], low: float, high: float) -> None:
        # With every ratio clipped, the loss shows the bounds: +A at its upper, -A at its lower.
        loss = build_loss(LossConfig.model_validate(config))
        a = 0.5 / (math.sqrt(0.5) + 1e-4)
        for ratio, expected in ((9.0, -(1 + high) * a), (-9.0, (1 - low) * a)):
            step = Step(rewards=[[1, 0]], included=[[True, True]], ratios=[[[ratio], [ratio]]])
            _, metrics = gradient(policy_share(loss, step), step, [[(0, 0 if ratio > 0 else 1)]])
            assert metrics.values()["loss/policy"] == pytest.approx(expected / 2, rel=1e-12)

    @pytest.mark.parametrize("type_", ["real", "real_bce"])
    def test_labels_and_tau(self, type_: str) -> None:
        step = Step(rewards=[[0.2, 0.4, 0.9]], included=[[True] * 3], ratios=[[[0.0]] * 3])

        def signs(**config: object) -> list[float]:
            loss = build_loss(LossConfig.model_validate({"type": type_, **config}))
            actual, _ = gradient(policy_share(loss, step), step, [step.places()])
            return flat(actual)

        def is_up(gradients: list[float]) -> list[bool]:
            return [g < 0 for g in gradients]

        assert signs() == [0.0] * 3
        assert is_up(signs(positive_above=0.3)) == [False, True, True]
        assert is_up(signs(labels="group_mean")) == [False, False, True]
        narrow, wide = (signs(positive_above=0.3, tau=tau) for tau in (0.5, 1.0))
        assert narrow == pytest.approx([2 * g for g in wide])
