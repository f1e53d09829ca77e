"""Groups without a gradient: no graph and no backward pass, but metrics and records as all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import make_group, ticket_of
from learner_ranks import TEMPERATURE
from reference_gradients import assert_equal, load, reference, token_logprobs
from tiny_model import build_model
from torch import Tensor

from actors.protocol import LearnerSpec, TrainedBatch
from actors.requests import rank_work
from actors.train_batch import BatchTrainer
from real_ray.config import LearnerConfig, LossConfig
from real_ray.policy import PolicyInput, load_policy
from real_ray.types import RolloutGroup

MIXED = make_group("mixed", prompt_length=5, lengths=(3, 4), rewards=(1, 0))
RIGHT = make_group("right", prompt_length=3, lengths=(2, 5), rewards=(1, 1))
WRONG = make_group("wrong", prompt_length=4, lengths=(1, 6), rewards=(0, 0))


class Engine:
    """What `BatchTrainer` uses of a `DeepSpeedEngine`, in one process and without an optimiser."""

    def __init__(self, policy: torch.nn.Module, *, idle_factor: float = 1.0) -> None:
        self.module = policy
        self._idle_factor = idle_factor  # of log-probs without a graph
        self.optimizer = self.basic_optimizer = object()
        self.passes: list[tuple[int, bool]] = []  # tokens, and whether with a graph

    def __call__(self, inputs: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
        self.passes.append((len(inputs.tokens), torch.is_grad_enabled()))
        logprobs, entropy = self.module(inputs, temperature)
        return logprobs * (1.0 if torch.is_grad_enabled() else self._idle_factor), entropy

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        torch.autograd.backward(loss)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...

    def get_lr(self) -> list[float]:
        return [0.0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(
    model: Path, groups: list[RolloutGroup], loss: LossConfig, **options: float
) -> tuple[Engine, TrainedBatch]:
    config = LearnerConfig(dtype="float32")
    policy = load_policy(str(model), dtype=torch.float32, packing=True, trust_remote_code=False)
    spec = LearnerSpec(
        rank=0,
        world_size=1,
        model=str(model),
        trust_remote_code=False,
        device="cpu",
        seed=0,
        num_threads=1,
        num_steps=1,
        temperature=TEMPERATURE,
        run_directory=str(model),
        config=config,
        loss=loss,
        deepspeed={},
    )
    engine = Engine(policy, **options)
    trainer = BatchTrainer(spec, engine, reference=None, pad_token_id=0)
    (work,) = rank_work([ticket_of(g) for g in groups], learner=config, loss=loss, policy_version=1)
    return engine, trainer.train(work.request, groups)


@pytest.mark.parametrize("kind", ["real", "real_bce", "grpo", "dapo", "gspo"])
def test_only_groups_with_a_gradient_have_a_graph(model: Path, kind: Any) -> None:
    loss = LossConfig(type=kind)
    engine, trained = train(model, [RIGHT, MIXED, WRONG], loss)
    assert engine.passes == [(14, False), (7, True)]
    gradients = {
        name.removeprefix("model."): parameter.grad.numpy()
        for name, parameter in engine.module.named_parameters()
        if parameter.grad is not None
    }
    assert_equal(gradients, reference(load(model), [RIGHT, MIXED, WRONG], loss))
    mismatch = [
        logprobs.detach().numpy() - completion.generator_logprobs
        for group, of_group in zip(
            [RIGHT, MIXED, WRONG],
            token_logprobs(load(model), [RIGHT, MIXED, WRONG]),
            strict=True,
        )
        for logprobs, completion in zip(of_group, group.sampled.completions, strict=True)
    ]
    metrics = trained.metrics.values()
    assert metrics["logprobs/mismatch_mean"] == pytest.approx(
        np.abs(np.concatenate(mismatch)).mean(), rel=1e-4
    )
    scores = {(s.uid, s.index): s.score for s in trained.samples}
    assert list(scores.values()) == pytest.approx([m.mean() for m in mismatch], rel=1e-4)


def test_a_step_without_any_gradient_runs_one_token_with_a_graph(model: Path) -> None:
    engine, trained = train(model, [RIGHT, WRONG], LossConfig())
    assert engine.passes == [(14, False), (1, True)]
    assert trained.metrics.values()["policy/grad_norm"] == 0.0


def test_a_group_without_a_gradient_can_still_spoil_the_step(model: Path) -> None:
    _, trained = train(model, [RIGHT, MIXED], LossConfig(), idle_factor=math.nan)
    assert trained.metrics.values()["learner/skipped"] == 1.0
