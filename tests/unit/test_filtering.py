"""Which groups teach something."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import rollout_ticket

from real_ray.config import LossConfig
from real_ray.filtering import is_two_sided
from real_ray.types import RolloutTicket


def ticket(rewards: tuple[float, ...], *, truncated: tuple[int, ...] = ()) -> RolloutTicket:
    group = rollout_ticket("p:0", members=len(rewards))
    flags = tuple(index in truncated for index in range(len(rewards)))
    return replace(group, rewards=rewards, sampled=replace(group.sampled, truncated=flags))


@pytest.mark.parametrize(
    ("loss", "rewards", "expected"),
    [
        ({}, (1.0, 0.0), True),
        ({}, (1.0, 1.0), False),
        ({}, (0.0, 0.0), False),
        ({"positive_above": 0.5}, (0.5, 0.0), False),  # unequal, but both negative
        ({"positive_above": 0.5}, (0.6, 0.5), True),
        ({"labels": "group_mean"}, (0.2, 0.1), True),
        ({"labels": "group_mean"}, (0.2, 0.2), False),
        ({"type": "real_bce"}, (0.2, 0.1), False),
        ({"type": "grpo"}, (0.2, 0.1), True),
        ({"type": "grpo"}, (0.2, 0.2), False),
    ],
)
def test_two_sided(loss: dict[str, object], rewards: tuple[float, ...], expected: bool) -> None:
    assert is_two_sided(ticket(rewards), LossConfig.model_validate(loss)) is expected


@pytest.mark.parametrize("kind", ["real", "grpo"])
def test_members_that_do_not_count_give_no_class(kind: str) -> None:
    group = ticket((1.0, 0.0, 0.0), truncated=(0,))
    keep = LossConfig.model_validate({"type": kind})
    exclude = LossConfig.model_validate({"type": kind, "truncated": "exclude"})
    assert is_two_sided(group, keep)
    assert not is_two_sided(group, exclude)
    assert not is_two_sided(ticket((1.0, 0.0), truncated=(0, 1)), exclude)
