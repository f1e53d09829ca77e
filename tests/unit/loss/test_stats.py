from __future__ import annotations

import pytest
import torch

from real_ray.loss import real_metrics

SCORES = torch.tensor([[0.10, -0.20, 0.30, -0.05], [0.1, -0.2, 0.4, 0.0]], dtype=torch.float64)
POSITIVE = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
V1_WEIGHTS = 0.494618360 + 0.901253412 + 0.977805315 + 0.485563750


def test_metrics_of_a_batch() -> None:
    values = real_metrics(SCORES, POSITIVE, 0.5).values()
    assert values == pytest.approx(
        {
            "real/loss": 1.256353929,
            "real/two_sided": 0.5,
            "real/score_pos": (0.1 - 0.2 + 0.1 - 0.2 + 0.4 + 0.0) / 6,
            "real/score_neg": 0.125,
            "real/score_min": -0.2,
            "real/score_max": 0.4,
            "real/weight_abs": V1_WEIGHTS / 8,
        },
        abs=1e-9,
    )


def test_only_two_sided_groups_may_count() -> None:
    values = real_metrics(SCORES, POSITIVE, 0.5, group_denominator="valid").values()
    assert values["real/loss"] == pytest.approx(2.512707858, abs=1e-9)
    assert values["real/two_sided"] == 0.5


def test_excluded_members_count_nowhere() -> None:
    included = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    values = real_metrics(SCORES, POSITIVE, 0.5, included).values()
    assert values["real/score_neg"] == pytest.approx(0.3)
    assert values["real/score_max"] == pytest.approx(0.3)
    assert values["real/loss"] == pytest.approx(2.234603936 / 2)


def test_a_class_without_members_has_no_key() -> None:
    scores = torch.tensor([[0.5, 1.0]])
    values = real_metrics(scores, torch.tensor([[1, 1]]), 0.5, group_denominator="valid").values()
    assert "real/score_neg" not in values
    assert values["real/score_pos"] == 0.75
    assert values["real/loss"] == 0.0

    excluded = torch.zeros(1, 2, dtype=torch.bool)
    values = real_metrics(scores, torch.tensor([[1, 1]]), 0.5, excluded).values()
    assert values == {"real/loss": 0.0, "real/two_sided": 0.0}


def test_scores_may_be_bfloat16_in_a_graph() -> None:
    scores = SCORES.bfloat16().requires_grad_()
    values = real_metrics(scores, POSITIVE, 0.5).values()
    assert values["real/loss"] == pytest.approx(1.256, abs=0.01)


def test_unknown_denominator_is_refused() -> None:
    with pytest.raises(ValueError, match="'some'"):
        real_metrics(SCORES, POSITIVE, 0.5, group_denominator="some")  # type: ignore[arg-type]
