"""The learner's gradient, over ranks and micro-batches, against one process in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from groups import make_group
from local_ray import local_ray
from recording_learner import Gradients, RecordingLearner
from tiny_model import build_model

from actors.node import LOOPBACK, free_port
from actors.protocol import LearnerSpec, TrainedBatch
from real_ray.batching import GroupShape, assign_to_ranks
from real_ray.config import LearnerConfig, LossConfig
from real_ray.errors import LearnerError
from real_ray.partial_metrics import PartialMetrics
from real_ray.types import RolloutGroup

TAU, TEMPERATURE = 0.5, 0.6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = build_model(tmp_path_factory.mktemp("tiny"))
    env = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # where the actor's class is
    }
    with local_ray(env):
        yield directory


@pytest.fixture
def start_ranks(model: Path) -> Iterator[Callable[..., list[Any]]]:
    started: list[Any] = []

    def start(
        world_size: int,
        *,
        zero_stage: int = 2,
        max_tokens: int = 100_000,
        denominator: str = "all",
        **learner: Any,
    ) -> list[Any]:
        ranks = [
            ray.remote(RecordingLearner)
            .options(num_cpus=0.5)
            .remote(
                LearnerSpec(
                    rank=rank,
                    world_size=world_size,
                    model=str(model),
                    trust_remote_code=False,
                    device="cpu",
                    seed=0,
                    num_threads=1,
                    num_steps=10,
                    temperature=TEMPERATURE,
                    config=LearnerConfig(
                        dtype="float32",
                        zero_stage=zero_stage,
                        max_tokens_per_microbatch=max_tokens,
                        max_grad_norm=1e9,
                        learning_rate=1e-3,
                        timeout_s=120.0,
                        **learner,
                    ),
                    loss=LossConfig(tau=TAU, group_denominator=denominator),
                )
            )
            for rank in range(world_size)
        ]
        started.extend(ranks)
        port = free_port(LOOPBACK)
        ray.get([rank.start.remote(LOOPBACK, port) for rank in ranks], timeout=180)
        return ranks

    yield start
    for rank in started:
        ray.kill(rank)


def train(ranks: Sequence[Any], groups: Sequence[RolloutGroup]) -> list[TrainedBatch]:
    shares = assign_to_ranks([GroupShape.of(g).padded_tokens for g in groups], len(ranks))
    return ray.get(
        [
            rank.train.remote(1, *(groups[i] for i in share))
            for rank, share in zip(ranks, shares, strict=True)
        ],
        timeout=180,
    )


def reference(model: Path, groups: Sequence[RolloutGroup], denominator: int) -> Gradients:
    """Each completion alone, unpadded, in float64; the loss written out from the formula."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        positive: list[torch.Tensor] = []
        negative: list[torch.Tensor] = []
        prompt = group.sampled.prompt.token_ids
        for completion, reward in zip(group.sampled.completions, group.rewards, strict=True):
            ids = torch.tensor(np.concatenate([prompt, completion.token_ids]))[None].long()
            logits = policy(input_ids=ids).logits[0] / TEMPERATURE
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
            score = (chosen - torch.tensor(completion.generator_logprobs).double()).mean()
            (positive if reward > 0 else negative).append(score)
        if positive and negative:
            total = total + torch.log(1 + sum(torch.exp(-s / TAU) for s in positive))
            total = total + torch.log(1 + sum(torch.exp(s / TAU) for s in negative))
    (total / denominator).backward()
    return {name: p.grad.numpy() for name, p in policy.named_parameters()}


MIXED = [
    make_group("a", prompt_length=9, lengths=(1, 7, 3, 12), rewards=(1, 0, 0, 1)),
    make_group("b", prompt_length=4, lengths=(5, 5, 5, 5), rewards=(1, 1, 1, 1)),
    make_group("c", prompt_length=17, lengths=(2, 40, 1, 9), rewards=(0, 0, 0, 1)),
    make_group("d", prompt_length=6, lengths=(8, 2, 4, 6), rewards=(1, 1, 0, 1)),
    make_group("e", prompt_length=3, lengths=(3, 3, 1, 2), rewards=(0, 0, 0, 0)),
]
# The long group goes to one rank, and the other has one-sided groups only.
ONE_RANK_ONE_SIDED = [
    make_group("f", prompt_length=30, lengths=(20, 4, 20, 4), rewards=(1, 0, 1, 0)),
    make_group("g", prompt_length=4, lengths=(5, 2, 5, 5), rewards=(1, 1, 1, 1)),
    make_group("h", prompt_length=4, lengths=(5, 1, 5, 5), rewards=(0, 0, 0, 0)),
]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"zero_stage": 2, "max_tokens": 100_000, "denominator": "all"}),  # one micro-batch
        (1, {"zero_stage": 0, "max_tokens": 100, "denominator": "valid"}),  # several
        (2, {"zero_stage": 2, "max_tokens": 100, "denominator": "valid"}),  # uneven over the ranks
        (2, {"zero_stage": 3, "max_tokens": 150, "denominator": "all"}),
    ],
)
def test_gradient_equals_the_one_of_a_single_process(
    model: Path,
    start_ranks: Callable[..., list[Any]],
    world_size: int,
    options: dict[str, Any],
) -> None:
    ranks = start_ranks(world_size, **options)
    parts = train(ranks, MIXED)
    expected = reference(model, MIXED, 5 if options["denominator"] == "all" else 3)
    got = ray.get(ranks[0].gradients.remote())
    assert got.keys() == expected.keys()
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-3, atol=2e-6 * scale, err_msg=name)
    norm = math.sqrt(sum(float((g**2).sum()) for g in expected.values()))
    assert parts[0].grad_norm == pytest.approx(norm, rel=1e-4)
    assert len({part.num_microbatches for part in parts}) == 1, "ranks must run in lockstep"
    samples = [sample for part in parts for sample in part.samples]
    assert sorted((s.uid, s.index) for s in samples) == [(u, i) for u in "abcde" for i in range(4)]
    assert all(s.weight == 0 for s in samples if s.uid in "be"), "one-sided groups weigh nothing"
    metrics = PartialMetrics.merge(part.metrics for part in parts).values()
    assert metrics["real/two_sided"] == pytest.approx(3 / 5)


def test_a_rank_or_a_batch_of_one_sided_groups_neither_hangs_nor_moves_the_policy(
    model: Path, start_ranks: Callable[..., list[Any]]
) -> None:
    ranks = start_ranks(2, zero_stage=2, max_tokens=100, denominator="valid")
    all_one_sided = train(ranks, [MIXED[1], MIXED[4]])
    assert [part.grad_norm for part in all_one_sided] == [0.0, 0.0]
    # The policy has not moved: the reference still starts from the files.
    train(ranks, ONE_RANK_ONE_SIDED)
    expected = reference(model, ONE_RANK_ONE_SIDED, 1)
    got = ray.get(ranks[1].gradients.remote())
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-3, atol=2e-6 * scale, err_msg=name)


def test_the_learning_rate_rises_over_the_warm_up_and_then_follows_the_schedule(
    start_ranks: Callable[..., list[Any]],
) -> None:
    ranks = start_ranks(1, warmup_ratio=0.4, lr_schedule="linear")  # of 10 steps
    rates = [train(ranks, ONE_RANK_ONE_SIDED[:1])[0].learning_rate for _ in range(7)]
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


def test_a_gradient_that_is_not_finite_is_an_error_that_names_step_and_groups(
    start_ranks: Callable[..., list[Any]],
) -> None:
    def spoil(actor: Any) -> None:
        with torch.no_grad():
            actor._engine.module.get_input_embeddings().weight.fill_(float("inf"))

    ranks = start_ranks(1)
    ray.get(ranks[0].__ray_call__.remote(spoil))
    with pytest.raises(LearnerError, match=r"gradient of step 1 is not finite.*groups f.*dtype"):
        train(ranks, ONE_RANK_ONE_SIDED[:1])
