"""How often a learner is started again."""

from __future__ import annotations

import pytest

from actors.restarts import Restarts
from real_ray.errors import LearnerLostError, RunError


def test_losses_without_progress_are_bounded_and_the_last_error_is_told() -> None:
    restarts = Restarts(2)
    for _ in range(2):
        restarts.count(RunError("rank 1 died"), reached=7)
    with pytest.raises(
        LearnerLostError, match=r"^rank 1 died again; .* 2 times since it had finished step 7 \(lea"
    ):
        restarts.count(RunError("rank 1 died again"), reached=5)


def test_progress_begins_anew_and_steps_made_again_are_none() -> None:
    restarts = Restarts(2)
    for reached in (0, 10, 20, 30):
        restarts.count(RunError("died"), reached=reached)
        assert restarts.in_a_row == 1
    restarts.count(RunError("died"), reached=30)
    assert restarts.in_a_row == 2
    with pytest.raises(LearnerLostError):
        restarts.count(RunError("died"), reached=29)


def test_none_may_be_allowed() -> None:
    with pytest.raises(LearnerLostError):
        Restarts(0).count(RunError("died"), reached=3)
