"""The learner's gradient, over ranks, micro-batches and layouts, against one process in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import make_group, shape_of
from learner_ranks import TEMPERATURE, LearnerRanks, two_sizes_of_learner
from recording_learner import Gradients
from tiny_model import build_model

from actors.requests import layout_of
from real_ray.batching import Slice, num_tokens
from real_ray.config import LossConfig
from real_ray.types import RolloutGroup

TAU = 0.5

MIXED = [
    make_group("a", prompt_length=9, lengths=(1, 7, 3, 12), rewards=(1, 0, 0, 1), truncated=(3,)),
    make_group("b", prompt_length=4, lengths=(5, 5, 5, 5), rewards=(1, 1, 1, 1)),
    make_group("c", prompt_length=12, lengths=(14, 20, 1, 19), rewards=(0, 0, 0, 1), truncated=(1,)),
    make_group("d", prompt_length=6, lengths=(8, 2, 4, 6), rewards=(1, 1, 0, 1)),
    make_group("e", prompt_length=3, lengths=(3, 3, 1, 2), rewards=(0, 0, 0, 0), truncated=(0, 1)),
]
# The long group goes to one rank, and the other has one-sided groups only.
ONE_RANK_ONE_SIDED = [
    make_group("f", prompt_length=30, lengths=(20, 4, 20, 4), rewards=(1, 0, 1, 0)),
    make_group("g", prompt_length=4, lengths=(5, 2, 5, 5), rewards=(1, 1, 1, 1)),
    make_group("h", prompt_length=4, lengths=(5, 1, 5, 5), rewards=(0, 0, 0, 0)),
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
def learners(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, LearnerRanks]]:
    with two_sizes_of_learner(model, tmp_path_factory.mktemp("run")) as found:
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


def token_logprobs(model: Path, groups: Sequence[RolloutGroup]) -> tuple[Any, list[list[Any]]]:
    """Each completion alone, unpadded, in float64."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)

    def of(prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
        ids = torch.tensor(np.concatenate([prompt, completion]))[None].long()
        logprobs = (policy(input_ids=ids).logits[0] / TEMPERATURE).log_softmax(-1)
        return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]

    return policy, [
        [of(g.sampled.prompt.token_ids, c.token_ids) for c in g.sampled.completions] for g in groups
    ]


def real(scores: list[torch.Tensor], positive: list[bool]) -> torch.Tensor:
    """The loss of a group, written out."""
    if len(set(positive)) < 2:
        return 0.0 * sum(scores)
    pull = [torch.exp(-s / TAU) for s, p in zip(scores, positive, strict=True) if p]
    push = [torch.exp(s / TAU) for s, p in zip(scores, positive, strict=True) if not p]
    return torch.log(1 + sum(pull)) + torch.log(1 + sum(push))


def reference(model: Path, groups: Sequence[RolloutGroup], loss: LossConfig) -> Gradients:
    """The gradient of one optimiser step, from the formulas."""
    policy, logprobs = token_logprobs(model, groups)
    parts: list[torch.Tensor] = []
    sided = tokens = sequences = 0
    kl = torch.zeros((), dtype=torch.float64)
    for group, of_group in zip(groups, logprobs, strict=True):
        kept = [
            (lp, lp - torch.tensor(c.generator_logprobs).double(), float(r))
            for lp, c, r in zip(of_group, group.sampled.completions, group.rewards, strict=True)
            if loss.truncated == "include" or c.finish_reason != "length"
        ]
        rewards = [r for _, _, r in kept]
        mean = sum(rewards) / len(rewards)
        std = float(np.std(rewards, ddof=1))
        bound = 0.0 if loss.labels == "threshold" else mean
        positive = [r > bound for r in rewards]
        sided += len(set(positive)) == 2
        tokens += sum(len(lp) for lp, _, _ in kept)
        sequences += len(kept)
        # The reference policy is the one of the start, so KL has gradient 0 there; see below.
        kl = kl + sum(((lp.detach() - lp).exp() - 1 - (lp.detach() - lp)).sum() for lp, _, _ in kept)
        if loss.type == "real":
            parts.append(real([ratio.mean() for _, ratio, _ in kept], positive))
            continue
        for _, ratio, reward in kept:
            advantage = (reward - mean) / (std + 1e-4)
            if loss.type in ("grpo", "dapo"):
                high = 0.2 if loss.type == "grpo" else 0.28
                r = ratio.exp()
                per_token = -torch.minimum(r * advantage, r.clamp(0.8, 1 + high) * advantage)
                parts.append(per_token.mean() if loss.type == "grpo" else per_token.sum())
            elif loss.type == "gspo":
                r = ratio.mean().exp()
                parts.append(-torch.minimum(r * advantage, r.clamp(1 - 3e-4, 1 + 4e-4) * advantage))
            elif len(set(positive)) == 2:  # real_bce
                sign = 1.0 if reward > bound else -1.0
                parts.append(torch.log(1 + torch.exp(-sign * ratio.mean() / TAU)))
    denominator = {
        "real": len(groups) if loss.group_denominator == "all" else sided,
        "grpo": sequences,
        "dapo": tokens,
        "gspo": sequences,
        "real_bce": len(parts),
    }[loss.type]
    (sum(parts) / denominator + loss.beta * kl / tokens).backward()
    return {name: p.grad.numpy() for name, p in policy.named_parameters()}


def assert_equal(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-3, atol=4e-6 * scale, err_msg=name)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Gradients]:
    return {
        truncated: reference(model, MIXED, LossConfig(tau=TAU, truncated=truncated))
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
    for share, truncated in product((1.0, 0.5, 0.25, 0.0), ("include", "exclude")):
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
