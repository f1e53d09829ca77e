"""The learner's gradient, against one process in float64."""

from __future__ import annotations

import math
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import make_group
from learner_batches import MIXED, ONE_LONG, ONE_RANK_ONE_SIDED, budget, uneven
from learner_ranks import LearnerRanks
from recording_learner import Gradients
from reference_gradients import assert_equal, load, reference

from actors.requests import layout_of
from real_ray.config import LossConfig

TAU = 0.5

LAYOUTS = {
    "padded": {"packing": False, "share_prefix": False},
    "packed": {"share_prefix": False},
    "shared_prefix": {},
}


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
    ("minibatches", "parts"),
    [(2, [[0]]), (2, [[0], [1, 2]]), (4, [[0], [1], [2]]), (4, [[0], [1, 2], [3], [4, 5]])],
    ids=str,
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
