"""The learner: its gradient against one process in float64, its steps and its checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from driver_states import assert_same_group, driver_state
from groups import make_group, shape_of
from learner_ranks import LearnerRanks, two_sizes_of_learner
from recording_learner import Gradients
from reference_gradients import assert_equal, load, reference, token_logprobs
from tiny_model import build_model

from actors.buffered_groups import restore
from actors.requests import layout_of
from real_ray.batching import Slice, num_tokens
from real_ray.checkpoint import to_json
from real_ray.config import LossConfig
from real_ray.errors import CheckpointError, GroupError, LearnerError
from real_ray.types import RolloutGroup, VersionSpan

TAU = 0.5

MIXED = [
    make_group("a", prompt_length=9, lengths=(1, 7, 3, 12), rewards=(1, 0, 0, 1), truncated=(3,)),
    make_group("b", prompt_length=4, lengths=(5, 5, 5, 5), rewards=(1, 1, 1, 1)),
    make_group(
        "c", prompt_length=12, lengths=(14, 20, 1, 19), rewards=(0, 0, 0, 1), truncated=(1,)
    ),
    make_group("d", prompt_length=6, lengths=(8, 2, 4, 6), rewards=(1, 1, 0, 1)),
    make_group("e", prompt_length=3, lengths=(3, 3, 1, 2), rewards=(0, 0, 0, 0), truncated=(0, 1)),
]
# The long group goes to one rank, and the other has one-sided groups only.
ONE_RANK_ONE_SIDED = [
    make_group("f", prompt_length=30, lengths=(20, 4, 20, 4), rewards=(1, 0, 1, 0)),
    make_group("g", prompt_length=4, lengths=(5, 2, 5, 5), rewards=(1, 1, 1, 1)),
    make_group("h", prompt_length=4, lengths=(5, 1, 5, 5), rewards=(0, 0, 0, 0)),
]
# The first alone goes to both ranks; with the second, too, if rows are not padded.
ONE_LONG = [
    make_group("j", prompt_length=2, lengths=(30, 21, 1, 27), rewards=(1, 0, 0, 1)),
    make_group("k", prompt_length=3, lengths=(2, 9, 5, 4), rewards=(1, 0, 1, 0)),
]
LAYOUTS = {
    "padded": {"packing": False, "share_prefix": False},
    "packed": {"share_prefix": False},
    "shared_prefix": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def learners(model: Path, run_directory: Path) -> Iterator[dict[int, LearnerRanks]]:
    with two_sizes_of_learner(model, run_directory) as found:
        yield found


def budget(groups: Sequence[RolloutGroup], share: float, layout: Any) -> int:
    """Tokens of a micro-batch: this share of the step, or what the longest sequence needs."""
    shapes = [shape_of(group) for group in groups]
    whole = [Slice(group=g, members=shape.members) for g, shape in enumerate(shapes)]
    longest = max(
        num_tokens([Slice(group=g, members=(m,))], shapes, layout)
        for g, shape in enumerate(shapes)
        for m in shape.members
    )
    return max(longest, math.ceil(share * num_tokens(whole, shapes, layout)))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Gradients]:
    return {
        truncated: reference(load(model), MIXED, LossConfig(tau=TAU, truncated=truncated))
        for truncated in ("include", "exclude")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradient_equals_the_one_of_a_single_process(
    learners: dict[int, LearnerRanks],
    expected: dict[str, Gradients],
    num_ranks: int,
    zero_stage: int,
    layout: str,
) -> None:
    learner = learners[num_ranks]
    counts = set()
    for share, truncated in zip((1.0, 0.5, 0.25, 0.0), cycle(("include", "exclude")), strict=False):
        loss = LossConfig(tau=TAU, truncated=truncated)
        learner.configure(
            loss=loss,
            zero_stage=zero_stage,
            max_tokens_per_microbatch=budget(MIXED, share / num_ranks, layout),
            **LAYOUTS[layout],
        )
        assert layout_of(learner.config) == layout
        result = learner.train(MIXED)
        assert_equal(learner.gradients()[0], expected[truncated])
        counts.add((result["learner/microbatches"], result["learner/score_passes"] > 0))
        norm = math.sqrt(sum(float((g**2).sum()) for g in expected[truncated].values()))
        assert result["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert len({count for count, _ in counts}) >= 3, counts
    assert {is_cut for _, is_cut in counts} == {False, True}, "one pass where whole groups fit"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_group_on_two_ranks_has_the_gradient_of_a_single_process(
    model: Path, learners: dict[int, LearnerRanks], zero_stage: int, layout: str
) -> None:
    loss = LossConfig(tau=TAU)
    for groups, share in product((ONE_LONG[:1], ONE_LONG), (1.0, 0.0)):
        learners[2].configure(
            loss=loss,
            zero_stage=zero_stage,
            max_tokens_per_microbatch=budget(groups, share, layout),
            **LAYOUTS[layout],
        )
        result = learners[2].train(groups)
        assert_equal(learners[2].gradients()[0], reference(load(model), groups, loss))
        assert (result["learner/microbatches"] == 1) == (share == 1.0)
        assert (result["learner/score_passes"] == 0) == (share == 1.0), "the first runs once"


def uneven(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Micro-batches as small as can be: every group is cut."""
    return {"max_tokens_per_microbatch": budget(groups, 0.0, "shared_prefix")}


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(type="real", tau=TAU, group_denominator="valid"),
        LossConfig(type="real", tau=TAU, labels="group_mean", truncated="exclude"),
        LossConfig(type="real_bce", tau=TAU, truncated="exclude"),
        LossConfig(type="grpo"),
        LossConfig(type="dapo", truncated="exclude"),
        LossConfig(type="gspo"),
    ],
    ids=lambda loss: f"{loss.type}-{loss.labels}-{loss.group_denominator}-{loss.truncated}",
)
def test_every_loss_has_the_gradient_of_a_single_process(
    model: Path, learners: dict[int, LearnerRanks], loss: LossConfig
) -> None:
    # Off the policy that sampled, so that ratios are clipped on both sides.
    groups = [
        *MIXED,
        make_group("i", prompt_length=5, lengths=(6, 1, 9, 3), rewards=(0.2, 0.9, 0.5, 0.1)),
    ]
    learners[2].configure(loss=loss, **uneven(groups))
    result = learners[2].train(groups)
    assert_equal(learners[2].gradients()[0], reference(load(model), groups, loss))
    assert (result["learner/score_passes"] > 0) == (loss.type == "real"), "only REAL needs scores"


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"offload_optimizer": True, "zero_stage": 1},
        {"offload_optimizer": True, "zero_stage": 2},
        {"offload_optimizer": True, "offload_params": True, "zero_stage": 3},
        {"gradient_checkpointing": True, "zero_stage": 3},
    ],
    ids=str,
)
def test_memory_savers_change_no_gradient(
    learners: dict[int, LearnerRanks],
    expected: dict[str, Gradients],
    options: dict[str, Any],
) -> None:
    learners[2].configure(loss=LossConfig(tau=TAU), **uneven(MIXED), **options)
    learners[2].train(MIXED)
    assert_equal(learners[2].gradients()[0], expected["include"])


def test_long_rows_attend_segment_by_segment(
    model: Path, learners: dict[int, LearnerRanks]
) -> None:
    groups = [
        make_group("long", prompt_length=300, lengths=(150, 1, 90), rewards=(1, 0, 0)),
        make_group("longer", prompt_length=10, lengths=(400, 2, 200), rewards=(1, 0, 0)),
    ]
    expected = reference(load(model), groups, LossConfig(tau=TAU))
    for layout in LAYOUTS.values():
        learners[1].configure(loss=LossConfig(tau=TAU), **layout)
        learners[1].train(groups)
        assert_equal(learners[1].gradients()[0], expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (LossConfig(tau=TAU), {"zero_stage": 2}),
        (LossConfig(tau=TAU, old_logprobs="proximal"), {"zero_stage": 2}),
        (LossConfig(tau=TAU, old_logprobs="blend", blend_lambda=0.3), {"zero_stage": 3}),
        (LossConfig(tau=TAU, beta=0.5), {"zero_stage": 2}),
        (LossConfig(tau=TAU, beta=0.5, truncated="exclude"), {"zero_stage": 3}),
        (LossConfig(type="gspo", old_logprobs="proximal", beta=0.1), {"zero_stage": 0}),
    ],
    ids=lambda value: (
        f"{value.type}-{value.old_logprobs}-beta{value.beta}"
        if isinstance(value, LossConfig)
        else str(value)
    ),
)
def test_all_steps_of_a_batch_refer_to_the_policy_at_its_start(
    model: Path,
    learners: dict[int, LearnerRanks],
    num_ranks: int,
    loss: LossConfig,
    options: dict[str, Any],
) -> None:
    groups = [make_group(str(n), **SHAPES[n % 3]) for n in range(6)]
    learner = learners[num_ranks]
    learner.configure(
        loss=loss,
        prompts_per_step=6,
        minibatches_per_batch=2,
        learning_rate=2e-3,
        max_tokens_per_microbatch=40,
        **options,
    )
    metrics = learner.train(groups)
    policy, start = load(model), load(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    first = reference(policy, groups[:3], loss, start)
    optimizer.step()
    second = reference(policy, groups[3:], loss, start)
    got = learner.gradients()
    assert len(got) == 2
    assert_equal(got[0], first)
    # The first step of Adam is the sign of the gradient, which rounding decides where it is 0.
    error = math.sqrt(sum(float(((got[1][n] - g) ** 2).sum()) for n, g in second.items()))
    assert error < 2e-3 * math.sqrt(sum(float((g**2).sum()) for g in second.values()))
    assert ("policy/kl" in metrics) == (loss.beta > 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("minibatches", "parts"), [(2, [[0]]), (2, [[0], [1, 2]]), (4, [[0], [1], [2]])], ids=str
)
def test_a_last_batch_that_is_smaller_has_the_gradients_of_its_parts(
    model: Path,
    learners: dict[int, LearnerRanks],
    num_ranks: int,
    minibatches: int,
    parts: list[list[int]],
) -> None:
    loss, learner = LossConfig(tau=TAU), learners[num_ranks]
    groups = [make_group(str(n), **SHAPES[n % 2]) for n in range(len(sum(parts, [])))]  # noqa: RUF017
    learner.configure(
        loss=loss, prompts_per_step=8, minibatches_per_batch=minibatches, learning_rate=1e-9
    )  # so small that each part meets the policy of the files
    learner.train(groups)
    got = learner.gradients()
    assert len(got) == len(parts)
    for gradient, part in zip(got, parts, strict=True):
        assert_equal(gradient, reference(load(model), [groups[n] for n in part], loss))


SHAPES: list[dict[str, Any]] = [
    {"prompt_length": 5, "lengths": (9, 2, 14), "rewards": (1, 0, 0), "truncated": (2,)},
    {"prompt_length": 12, "lengths": (1, 6, 3), "rewards": (0, 1, 1)},
    {"prompt_length": 3, "lengths": (4, 4, 8), "rewards": (1, 1, 1), "truncated": (0,)},
]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_lora_trains_the_adapter_with_the_gradient_of_the_full_weight(
    learners: dict[int, LearnerRanks], expected: dict[str, Gradients], zero_stage: int
) -> None:
    learner = learners[2]
    learner.configure(
        loss=LossConfig(tau=TAU, beta=0.5),
        zero_stage=zero_stage,
        lora_rank=4,
        lora_alpha=8.0,
        weight_decay=0.1,
        **uneven(MIXED),
    )
    start = learner.parameters()
    metrics = learner.train(MIXED)
    got = learner.gradients()[0]
    assert got.keys() == {name for name in start if ".lora_" in name}
    scale = max(np.abs(gradient).max() for gradient in got.values())
    for name, gradient in got.items():
        if ".lora_A" in name:  # B is 0
            np.testing.assert_allclose(gradient, 0, atol=1e-12)
            continue
        weight = name.replace("lora_B.default.", "")
        down = start[name.replace("lora_B", "lora_A")]
        through = 8.0 / 4 * expected["include"][weight] @ down.T
        np.testing.assert_allclose(gradient, through, rtol=1e-3, atol=4e-6 * scale, err_msg=name)
    assert metrics["policy/kl"] == 0, "the reference is the base model"
    assert learner.train(MIXED, policy_version=2)["policy/kl"] > 0
    after = learner.parameters()
    for name, value in start.items():
        if ".lora_" not in name:
            np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_or_a_batch_of_one_sided_groups_neither_hangs_nor_moves_the_policy(
    model: Path, learners: dict[int, LearnerRanks], num_ranks: int
) -> None:
    learner, loss = learners[num_ranks], LossConfig(tau=TAU, group_denominator="valid")
    learner.configure(loss=loss, zero_stage=3, max_tokens_per_microbatch=100)
    assert learner.train([MIXED[1], MIXED[4]])["policy/grad_norm"] == 0.0
    # The policy has not moved: the reference still starts from the files.
    learner.train(ONE_RANK_ONE_SIDED, policy_version=2)
    assert_equal(learner.gradients()[1], reference(load(model), ONE_RANK_ONE_SIDED, loss))
    assert learner.train([MIXED[0]])["policy/grad_norm"] > 0, "a group less than there are ranks"


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
