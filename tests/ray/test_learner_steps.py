"""A learner besides its gradient: schedule, skipped steps, records, checkpoints, syncs."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from driver_states import assert_same_group, driver_state
from groups import make_group
from learner_batches import MIXED, ONE_LONG, ONE_RANK_ONE_SIDED, uneven
from learner_ranks import LearnerRanks
from reference_gradients import assert_equal, load, reference, token_logprobs

from actors.buffered_groups import restore
from real_ray.checkpoint import to_json
from real_ray.config import LossConfig
from real_ray.errors import CheckpointError, GroupError, LearnerError
from real_ray.types import RolloutGroup, VersionSpan

TAU = 0.5


def test_the_learning_rate_rises_over_the_warm_up_and_then_follows_the_schedule(
    learners: dict[int, LearnerRanks],
) -> None:
    learner = learners[1]
    learner.configure(
        warmup_ratio=0.4, lr_schedule="linear", prompts_per_step=2, minibatches_per_batch=2
    )  # of 10 optimiser steps
    rates = []
    for version in range(1, 5):
        learner.train(MIXED[:2], policy_version=version)
        rates.append(learner.learning_rate)
    # Of the second optimiser step of each batch.
    assert rates == pytest.approx([1e-3 * factor for factor in (0.5, 1.0, 5 / 6, 3 / 6)])


def spoiled(uid: str) -> RolloutGroup:
    """A group whose score is infinite in float32."""
    group = make_group(uid, prompt_length=5, lengths=(3, 4), rewards=(1, 0))
    group.sampled.completions[0].generator_logprobs[:] = -3e38
    return group


@pytest.mark.parametrize(("num_ranks", "zero_stage"), [(1, 0), (1, 2), (2, 1), (2, 3)])
def test_a_step_without_finite_gradient_is_skipped_kept_and_ends_the_run_when_repeated(
    model: Path,
    learners: dict[int, LearnerRanks],
    run_directory: Path,
    num_ranks: int,
    zero_stage: int,
) -> None:
    learner, loss = learners[num_ranks], LossConfig(tau=TAU)
    learner.configure(loss=loss, zero_stage=zero_stage, max_bad_steps=2)
    start = learner.parameters()
    good = make_group("good", prompt_length=5, lengths=(3, 4), rewards=(1, 0))
    metrics = learner.train([spoiled("bad"), good], policy_version=7)
    assert metrics["learner/skipped"] == 1
    assert not math.isfinite(metrics["policy/grad_norm"])
    (warning,) = learner.warnings
    directory = run_directory / "bad_steps" / "step_000007"
    assert warning.startswith("step 7: the loss or gradient is not finite")
    assert str(directory) in warning
    records = [
        json.loads(line) for path in directory.iterdir() for line in path.read_text().splitlines()
    ]
    assert sorted((r["uid"], r["index"], len(r["completion_ids"])) for r in records) == [
        ("bad", 0, 3), ("bad", 1, 4), ("good", 0, 3), ("good", 1, 4),
    ]  # fmt: skip
    shutil.rmtree(directory)
    for name, value in learner.parameters().items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)
    # As if the bad step had not been; and the count starts again.
    assert learner.train(MIXED, policy_version=8)["learner/skipped"] == 0
    assert_equal(learner.gradients()[-1], reference(load(model), MIXED, loss))
    learner.train([spoiled("worse")], policy_version=9)
    with pytest.raises(LearnerError, match=r"step 10: .* skipped in a row: 2.*max_bad_steps"):
        learner.train([spoiled("worst")], policy_version=10)


def test_mismatch_is_split_by_the_staleness_of_each_token(
    learners: dict[int, LearnerRanks], model: Path
) -> None:
    group = make_group("mixed", prompt_length=5, lengths=(3, 4), rewards=(1, 0))
    first, second = group.sampled.completions
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=5, start=1, end=4))
    group = replace(
        group,
        sampled=replace(
            group.sampled,
            completions=(
                replace(first, spans=(VersionSpan(version=4, start=0, end=3),)),
                replace(second, spans=spans),
            ),
        ),
    )
    learners[1].configure()
    metrics = learners[1].train([group], policy_version=6)
    logprobs = token_logprobs(load(model), [group])[0]
    difference = [
        lp.detach().numpy() - c.generator_logprobs
        for lp, c in zip(logprobs, group.sampled.completions, strict=True)
    ]
    for staleness, values in {0: difference[1][1:], 1: difference[0], 2: difference[1][:1]}.items():
        for name, expected in (
            ("mean", np.abs(values).mean()),
            ("max", np.abs(values).max()),
            ("k3", (np.exp(values) - 1 - values).mean()),
        ):
            key = f"logprobs/mismatch_{name}_staleness_{staleness}"
            assert metrics[key] == pytest.approx(expected, rel=1e-4), key
    assert metrics["logprobs/mismatch_max"] == pytest.approx(
        np.abs(np.concatenate(difference)).max()
    )


def test_records_say_what_each_completion_weighed(learners: dict[int, LearnerRanks]) -> None:
    learners[2].configure(loss=LossConfig(tau=TAU, truncated="exclude"), **uneven(MIXED))
    metrics = learners[2].train(MIXED)
    samples = learners[2].samples
    assert sorted((s.uid, s.index) for s in samples) == [(u, i) for u in "abcde" for i in range(4)]
    assert all(s.weight == 0 for s in samples if s.uid in "be"), "one-sided groups weigh nothing"
    assert {s.label for s in samples if s.finish_reason == "length"} == {None}
    assert all(s.weight == 0 for s in samples if s.label is None)
    assert all((s.weight < 0) == (s.label == 1) for s in samples if s.weight)
    assert metrics["real/two_sided"] == pytest.approx(3 / 5)


def test_a_sequence_above_the_budget_is_refused_by_name(
    learners: dict[int, LearnerRanks],
) -> None:
    learners[1].configure(max_tokens_per_microbatch=20)
    with pytest.raises(GroupError, match=r"group c, member 1: 31 tokens are above .* = 20"):
        learners[1].train(MIXED)


@pytest.mark.parametrize(
    ("zero_stage", "options"),
    [(0, {}), (1, {}), (2, {"weight_decay": 0.1}), (3, {}), (2, {"lora_rank": 4})],
    ids=str,
)
def test_a_checkpoint_goes_on_exactly_and_on_another_number_of_ranks(
    learners: dict[int, LearnerRanks],
    tmp_path: Path,
    zero_stage: int,
    options: dict[str, Any],
) -> None:
    settings = {"zero_stage": zero_stage, "warmup_ratio": 0.5, **options}
    settings["max_tokens_per_microbatch"] = 60
    one, two = learners[1], learners[2]
    two.configure(**settings)
    two.train(MIXED)
    two.save_checkpoint(tmp_path / "step_000001", driver_state(1))
    two.train(ONE_RANK_ONE_SIDED, policy_version=2)
    unbroken, rate = two.parameters(), two.learning_rate

    assert two.configure(checkpoint=tmp_path / "step_000001", **settings) == 1
    two.train(ONE_RANK_ONE_SIDED, policy_version=2)
    assert two.learning_rate == rate
    for name, value in two.parameters().items():
        np.testing.assert_array_equal(value, unbroken[name], err_msg=name)

    assert one.configure(checkpoint=tmp_path / "step_000001", **settings) == 1
    one.train(ONE_RANK_ONE_SIDED, policy_version=2)
    assert one.learning_rate == rate
    for name, value in one.parameters().items():
        np.testing.assert_allclose(value, unbroken[name], atol=2e-4, err_msg=name)

    with pytest.raises(CheckpointError, match=r"learner\.zero_stage"):
        one.configure(
            checkpoint=tmp_path / "step_000001", **settings | {"zero_stage": 1 + (zero_stage == 1)}
        )


def test_a_checkpoint_keeps_the_driver_state_and_its_buffered_groups(
    learners: dict[int, LearnerRanks], tmp_path: Path
) -> None:
    buffered = {2: MIXED[0], 4: MIXED[1], 17: ONE_LONG[0]}
    state = driver_state(1, buffered)
    learners[2].configure()
    learners[2].save_checkpoint(tmp_path / "step_000001", state)
    restored = restore(tmp_path / "step_000001")
    assert to_json(restored) == to_json(state)
    for got, group in zip(restored.buffered, buffered.values(), strict=True):
        assert_same_group(ray.get(got.group.ref), group)
    # A file that is damaged although its size is right.
    file = tmp_path / "step_000001" / "driver.json"
    file.write_text(file.read_text().replace('"buffered"', '"buffexxx"'))
    with pytest.raises(CheckpointError, match=r"driver\.json: .* Use an earlier checkpoint"):
        restore(tmp_path / "step_000001")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"driver\.json cannot be read: .* Use an earlier"):
        restore(tmp_path / "step_000001")


def test_two_ranks_gather_a_sync_in_one_order_bucket_by_bucket(
    learners: dict[int, LearnerRanks], tmp_path: Path
) -> None:
    """Also when the rank that sends fails: the other one would wait for it in a gather."""
    two, bucket_bytes = learners[2], 2**15
    file = tmp_path / "deepspeed.json"  # by default DeepSpeed leaves small parameters whole
    file.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    two.configure(zero_stage=2)
    expected, _ = two.call("gathered", bucket_bytes)
    two.configure(zero_stage=3, deepspeed=str(file))
    for rank in two.call("gathered", bucket_bytes):
        assert list(rank.shapes.items()) == list(expected.shapes.items())
        assert rank.checksums == expected.checksums
        largest = max(4 * math.prod(shape) for shape in expected.shapes.values())
        assert largest <= rank.most_bytes <= max(largest, bucket_bytes)
    middle = list(expected.shapes)[len(expected.shapes) // 2]
    for fails_at in ("", middle, "start", ""):
        sender, other = two.call("sync_with_itself", bucket_bytes, fails_at)
        if fails_at:
            assert "refused on purpose" in sender
        else:
            assert sender == expected.checksums
        assert other == {}, "it sends nothing, and did not fail"
