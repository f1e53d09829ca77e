"""Simulated runs against schedules that can be computed by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import repeat
from random import Random

import pytest
from fakes import make_config

from real_ray.config import Config
from real_ray.errors import LearnerError, RunError, SyncError
from real_ray.simulate import (
    Distribution,
    PlanResult,
    Timings,
    constant,
    parse_distribution,
    run_in_virtual_time,
    simulate,
)
from real_ray.simulate.distributions import measured
from real_ray.simulate.generators import SimulatedGenerators
from real_ray.simulate.roles import SimulatedBroadcaster
from real_ray.types import SyncReport

STEPS = 20


def timings(**seconds: float) -> Timings:
    """Of a generator that has room for one step's groups."""
    values = {"generate": 4.0, "score": 0.0, "train": 3.0, "sync": 2.0, "pause": 0.0, **seconds}
    return Timings(
        **{name: constant(value) for name, value in values.items()},  # type: ignore[arg-type]
        groups_per_generator=3,
    )


def config(max_staleness: int = 1, **sections: dict[str, object]) -> Config:
    """Steps of 3 groups of 2, without evaluations."""
    sections["run"] = {"num_steps": STEPS, **sections.get("run", {})}
    sections["rollout"] = {"max_staleness": max_staleness, **sections.get("rollout", {})}
    sections["reward"] = {"num_workers": 8, **sections.get("reward", {})}
    return make_config(**sections)


def seconds_of_a_late_step(config: Config, timings: Timings) -> float:
    """Without the steps that fill the pipeline."""
    longer = config.model_copy(
        update={"run": config.run.model_copy(update={"num_steps": 2 * STEPS})}
    )
    return (simulate(longer, timings).seconds - simulate(config, timings).seconds) / STEPS


def test_synchronous_steps_take_the_sum() -> None:
    result = simulate(config(0), timings(score=1))
    assert result.seconds_per_step == pytest.approx(4 + 1 + 3 + 2)
    assert result.seconds == pytest.approx(2 + STEPS * 10)  # version 0 is synced first
    assert result.groups_per_second == pytest.approx(3 * STEPS / result.seconds)
    assert result.completions_per_second == pytest.approx(2 * result.groups_per_second)
    assert result.learner_train == pytest.approx(0.3)
    assert result.learner_waits_for_groups == pytest.approx(0.5)
    assert result.learner_waits_for_sync == pytest.approx(0.2)
    assert 1 - result.generators_idle == pytest.approx(STEPS * 4 / result.seconds)
    assert result.slots_used == pytest.approx(STEPS * 4 / result.seconds)
    assert result.staleness == {0: 1.0}
    assert (result.buffer_max, result.buffer_empty) == (0, 1.0)
    assert result.ledger["drawn"] == result.ledger["trained"] == 3 * STEPS


@pytest.mark.parametrize(("generate", "train"), [(4, 3), (4, 9), (10, 3), (6, 5)])
def test_asynchronous_steps_take_the_longer_part(generate: float, train: float) -> None:
    plan = timings(generate=generate, train=train)
    expected = max(generate, train + 2)
    assert seconds_of_a_late_step(config(1), plan) == pytest.approx(expected)


def test_a_slow_learner_trains_on_groups_that_are_one_version_old() -> None:
    result = simulate(config(1), timings(train=20))
    # The first batch alone was sampled by the version that it trains.
    assert result.staleness == pytest.approx({0: 1 / STEPS, 1: 1 - 1 / STEPS})
    assert result.buffer_mean == pytest.approx(3 * (STEPS - 1) / STEPS)
    assert (result.buffer_max, result.buffer_empty) == (3, 1 / STEPS)


def test_staleness_is_what_the_pipeline_allows() -> None:
    results = [simulate(config(m), timings(train=20)) for m in (0, 2, 5)]
    assert [max(result.staleness) for result in results] == [0, 2, 5]
    # With few slots, at most a batch and a half, groups are as young as that.
    few = config(5, rollout={"oversample": 1.5})
    assert max(simulate(few, timings(train=20)).staleness) == 1


def test_running_groups_are_delayed_by_the_pause_and_no_more() -> None:
    assert seconds_of_a_late_step(config(1), timings(generate=10, pause=1)) == pytest.approx(11)
    result = simulate(config(1), timings(generate=10, pause=1))
    assert result.generators_paused == pytest.approx((STEPS - 1) / result.seconds)
    # A pause that the learner's part covers costs nothing.
    assert seconds_of_a_late_step(config(1), timings(generate=3, pause=1)) == pytest.approx(5)


def test_without_updates_in_flight_a_pause_waits_for_running_groups() -> None:
    drains = config(1, rollout={"in_flight_updates": False})
    # The pause waits for the groups that run; the next ones begin after it.
    plan = timings(generate=10, pause=2)
    assert seconds_of_a_late_step(drains, plan) == pytest.approx(10 + 2)
    assert simulate(drains, plan).generators_paused == 0


def test_groups_beyond_the_room_of_a_generator_wait() -> None:
    plan = dataclasses.replace(timings(), groups_per_generator=1)
    assert simulate(config(0), plan).seconds_per_step == pytest.approx(3 * 4 + 3 + 2)
    three = config(0, rollout={"num_generators": 3})
    assert simulate(three, plan).seconds_per_step == pytest.approx(4 + 3 + 2)
    four = simulate(config(0, rollout={"num_generators": 4}), plan)
    assert four.seconds_per_step == pytest.approx(4 + 3 + 2)
    assert 1 - four.generators_idle == pytest.approx(3 / 4 * STEPS * 4 / four.seconds)


def test_reward_workers_score_one_group_at_a_time() -> None:
    one = config(0, reward={"num_workers": 1})
    result = simulate(one, timings(score=5))
    assert result.seconds_per_step == pytest.approx(4 + 3 * 5 + 3 + 2)
    assert result.rewards_busy == pytest.approx(STEPS * 3 * 5 / result.seconds)
    five = config(0, reward={"num_workers": 5})
    result = simulate(five, timings(score=5))
    assert result.rewards_busy == pytest.approx(3 / 5 * STEPS * 5 / result.seconds)


def test_a_pause_that_is_all_of_its_sync_is_as_long_each_time() -> None:
    sync = parse_distribution("lognormal:2,1", option="--sync")
    plan = dataclasses.replace(timings(), sync=sync, pause=sync)

    async def work() -> list[SyncReport]:
        generators = SimulatedGenerators(config(), plan, seed=0)
        broadcaster = SimulatedBroadcaster(config(), plan, generators=generators, seed=1)
        return [await broadcaster.broadcast(policy_version=version) for version in range(5)]

    reports = run_in_virtual_time(work())
    assert len({report.seconds for report in reports}) == 5
    for report in reports:
        assert report.pause_seconds == pytest.approx(report.seconds)


def test_a_drawn_pause_ends_with_its_sync() -> None:
    pause = parse_distribution("lognormal:2,1", option="--pause")  # every other one is longer
    plan = dataclasses.replace(timings(), pause=pause)
    assert simulate(config(0), plan).seconds_per_step == pytest.approx(4 + 3 + 2)


def test_an_evaluation_holds_up_the_weights_that_come_after_it() -> None:
    evaluates = config(
        1, data={"eval": "arithmetic"}, eval={"every": 1, "num_prompts": 2, "at_start": False}
    )
    plan = dataclasses.replace(timings(generate=10), groups_per_generator=7)
    assert seconds_of_a_late_step(evaluates, plan) == pytest.approx(10 + 2)
    assert simulate(evaluates, plan).learner_waits_for_evaluation > 0.4
    assert simulate(config(1), plan).learner_waits_for_evaluation == 0


def test_evaluations_take_no_times_from_the_groups_of_a_step() -> None:
    # Both times once for each step: mixed within a step, every step would take the longer one.
    plan = dataclasses.replace(timings(), generate=measured([4.0, 8.0], in_a_row=3))
    evaluates = config(0, data={"eval": "arithmetic"}, eval={"num_prompts": 2})
    result = simulate(evaluates, dataclasses.replace(plan, groups_per_generator=9))
    assert result.seconds_per_step == pytest.approx((4 + 8) / 2 + 3 + 2)


def test_failed_generations_are_tried_again_and_counted() -> None:
    plan = dataclasses.replace(timings(), failures=0.3)
    result = simulate(config(0, rollout={"max_retries": 1}), plan)
    assert result.failed_generations > 10
    assert result.ledger["failed"] > 0
    assert result.ledger["trained"] == 3 * STEPS
    assert result.ledger["drawn"] == result.ledger["trained"] + result.ledger["failed"]
    assert result.seconds_per_step > 4 + 3 + 2 + 1


def test_one_sided_groups_are_replaced_if_asked_for() -> None:
    plan = dataclasses.replace(timings(), one_sided=0.5)
    assert simulate(config(0), plan).ledger["filtered"] == 0
    filters = config(0, rollout={"dynamic_sampling": True, "max_resample_times": 100})
    result = simulate(filters, plan)
    assert result.ledger["filtered"] == pytest.approx(3 * STEPS, rel=0.5)
    assert result.ledger["trained"] == 3 * STEPS
    assert result.seconds_per_step > 4 + 3 + 2 + 1


def test_evicted_stragglers_bound_the_wait_for_a_group() -> None:
    heavy = dataclasses.replace(
        timings(), generate=parse_distribution("pareto:2,1.1", option="--generate")
    )
    waits = config(0, run={"num_steps": 200}, rollout={"straggler_s": 20})
    result = simulate(waits, heavy)
    assert result.stragglers > 0
    assert result.ledger["evicted"] == 0
    evicts = config(0, run={"num_steps": 200}, rollout={"straggler": "evict", "straggler_s": 20})
    faster = simulate(evicts, heavy)
    assert faster.ledger["evicted"] == faster.stragglers > 0
    assert faster.seconds_per_step < 0.8 * result.seconds_per_step


def test_groups_that_are_evicted_while_they_wait_leave_their_place_to_others() -> None:
    # Nine groups are let in: three run for 4 s, three wait for them, three more are given up
    # after 7 s. A slow learner covers all of that but the first 4 s.
    evicts = config(2, rollout={"straggler": "evict", "straggler_s": 7})
    result = simulate(evicts, timings(train=20))
    assert result.ledger["evicted"] > 0
    assert result.ledger["trained"] == 3 * STEPS
    assert result.seconds_per_step == pytest.approx(20 + 2 + 4 / STEPS)


@pytest.mark.parametrize(
    ("section", "seconds", "error", "message"),
    [
        ({"rollout": {"timeout_s": 3}}, {}, RunError, r"within 3 s \(rollout.timeout_s\)"),
        ({"reward": {"timeout_s": 3}}, {"score": 5}, RunError, r"\(reward.timeout_s\)"),
        ({"learner": {"timeout_s": 2}}, {}, LearnerError, r"within 2 s \(learner.timeout_s\)"),
        (
            {"rollout": {"in_flight_updates": False}, "sync": {"timeout_s": 5}},
            {"generate": 20},
            SyncError,
            r"within 5 s \(sync.timeout_s\).*in_flight_updates",
        ),
        (
            {"sync": {"timeout_s": 5}},
            {"sync": 6},
            SyncError,
            r"weight sync of version 0: .* within 5 s \(sync.timeout_s\)",
        ),
    ],
)
def test_what_would_end_a_run_ends_its_simulation(
    section: dict[str, dict[str, object]],
    seconds: dict[str, float],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        simulate(config(1, **section), timings(**seconds))


def test_the_seed_alone_decides() -> None:
    plan = dataclasses.replace(
        timings(),
        generate=parse_distribution("lognormal:4,1", option="--generate"),
        train=parse_distribution("lognormal:3,0.3", option="--train"),
        failures=0.1,
    )

    def result(seed: int) -> PlanResult:
        return simulate(config(2, run={"seed": seed}), plan)

    assert result(1) == result(1)
    assert result(1) != result(2)


def test_roles_draw_their_times_apart() -> None:
    drawn: dict[str, float] = {}

    def draws(name: str) -> Distribution:
        def first(random: Random) -> Iterator[float]:
            drawn[name] = random.random()
            return repeat(1.0)

        return Distribution(name, 1.0, first)

    names = ("generate", "score", "train", "sync")
    simulate(config(0), dataclasses.replace(timings(), **{name: draws(name) for name in names}))
    assert drawn.keys() == set(names)
    assert len(set(drawn.values())) == len(names)


def test_progress_is_told() -> None:
    steps: list[int] = []
    simulate(config(1), timings(), progress=steps.append)
    assert steps == list(range(1, STEPS + 1))
