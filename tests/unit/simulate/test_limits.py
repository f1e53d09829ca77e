"""What a simulation says that holds a plan up, and what helps."""

from __future__ import annotations

import dataclasses

import pytest
from fakes import make_config
from pydantic import ValidationError

from real_ray.config import Config
from real_ray.simulate import PlanResult, Timings, constant, simulate
from real_ray.simulate.report import limit

TIMINGS = Timings(
    generate=constant(1),
    score=constant(10),
    train=constant(1),
    sync=constant(0),
    pause=constant(0),
    groups_per_generator=16,
)


def plan(max_staleness: int = 1, num_workers: int = 2) -> Config:
    """Steps of 8 groups, each of which takes ten times as long to score as to sample."""
    return make_config(
        run={"num_steps": 50},
        rollout={"max_staleness": max_staleness},
        learner={"prompts_per_step": 8},
        reward={"num_workers": num_workers},
    )


def result(**shares: float) -> PlanResult:
    """Of a plan in which the learner waits for groups half of the time."""
    waits = {"learner_waits_for_groups": 0.5, "learner_train": 0.3, "learner_waits_for_sync": 0.2}
    values = {"slots_used": 0.0, "rewards_busy": 0.0, **waits, **shares}
    return dataclasses.replace(simulate(plan(), TIMINGS), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shares", "word", "helps"),
    [
        ({"slots_used": 0.79, "rewards_busy": 0.79}, "pipeline", "a larger rollout.max_staleness"),
        ({"slots_used": 0.8}, "generators", "more or faster generators"),
        ({"rewards_busy": 0.8}, "rewards", "a larger reward.num_workers"),
        ({"slots_used": 0.9, "rewards_busy": 0.85}, "generators", "more or faster generators"),
        ({"slots_used": 0.85, "rewards_busy": 0.9}, "rewards", "a larger reward.num_workers"),
        ({"learner_waits_for_groups": 0.1}, "pipeline", "a larger rollout.max_staleness"),
        ({"learner_waits_for_groups": 0.09}, "training", "training 30%, weight sync 20%"),
        (
            {"learner_waits_for_groups": 0.09, "learner_waits_for_sync": 0.4},
            "weight sync",
            "training 30%, weight sync 40%",
        ),
        (
            {"learner_waits_for_groups": 0.09, "learner_waits_for_evaluation": 0.4},
            "evaluation",
            "evaluation 40%",
        ),
    ],
)
def test_the_fullest_part_is_the_limit(shares: dict[str, float], word: str, helps: str) -> None:
    found = limit(result(**shares))
    assert found.word == word
    assert helps in found.sentence


def test_what_is_said_to_help_helps() -> None:
    slow = simulate(plan(), TIMINGS)
    assert slow.seconds_per_step == pytest.approx(8 / 2 * 10, rel=0.05)
    assert slow.rewards_busy > 0.95
    assert limit(slow).word == "rewards"
    assert simulate(plan(max_staleness=3), TIMINGS).seconds_per_step > 0.95 * slow.seconds_per_step
    assert simulate(plan(num_workers=16), TIMINGS).seconds_per_step < 0.2 * slow.seconds_per_step


def test_no_larger_staleness_is_advised_than_is_allowed() -> None:
    stale = dataclasses.replace(result(), max_staleness=8)
    assert limit(stale).sentence.endswith(
        "in use; rollout.straggler: evict against slow groups helps most"
    )
    assert (
        "larger rollout.max_staleness"
        in limit(dataclasses.replace(stale, max_staleness=7)).sentence
    )
    with pytest.raises(ValidationError):
        plan(max_staleness=9)
