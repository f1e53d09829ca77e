"""The k3 estimate against its formula in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from real_ray.errors import GroupError
from real_ray.loss import kl_share
from real_ray.partial_metrics import PartialMetrics

no_deadline = settings(deadline=None)  # torch's first backward takes long

Token = tuple[float, float, bool]  # policy log-prob, reference log-prob, whether it counts
tokens = st.lists(
    st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.booleans()), min_size=1, max_size=12
)


def shared(part: list[Token], num_tokens: int) -> tuple[float, list[float], PartialMetrics]:
    logprobs, reference = (
        torch.tensor([token[i] for token in part], dtype=torch.float64, requires_grad=True)
        for i in (0, 1)
    )
    mask = torch.tensor([token[2] for token in part], dtype=torch.bool)
    value, metrics = kl_share(logprobs, reference, mask, num_tokens)
    value.backward()
    assert logprobs.grad is not None
    assert reference.grad is None
    return value.item(), logprobs.grad.tolist(), metrics


@no_deadline
@given(tokens)
def test_equals_the_formula(step: list[Token]) -> None:
    count = sum(token[2] for token in step)
    value, gradient, metrics = shared(step, count)
    differences = [r - p if counts else 0.0 for p, r, counts in step]
    total = math.fsum(math.exp(d) - 1 - d for d in differences)
    assert value == pytest.approx(total / max(count, 1), rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(
        [(1 - math.exp(d)) / max(count, 1) for d in differences], rel=1e-9, abs=1e-12
    )
    assert metrics.values() == pytest.approx({"policy/kl": value} if count else {})


@no_deadline
@given(tokens, st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_shares_of_parts_add_up(step: list[Token], where: list[int]) -> None:
    count = sum(token[2] for token in step)
    value, gradient, metrics = shared(step, count)
    places = [[i for i in range(len(step)) if where[i] == part] for part in range(4)]
    parts = [shared([step[i] for i in place], count) for place in places]
    assert sum(part[0] for part in parts) == pytest.approx(value, rel=1e-12, abs=1e-15)
    split: dict[int, float] = {}
    for place, part in zip(places, parts, strict=True):
        split |= zip(place, part[1], strict=True)
    assert [split[i] for i in range(len(step))] == pytest.approx(gradient)
    merged = PartialMetrics.merge(part[2] for part in parts)
    assert merged.values() == pytest.approx(metrics.values(), rel=1e-12, abs=1e-15)


def test_tokens_that_do_not_count_may_be_anything() -> None:
    step = [(-1.0, -2.0, True), (-math.inf, -1.0, False), (-1.0, math.nan, False)]
    value, gradient, _ = shared(step, 1)
    assert value == pytest.approx(math.exp(-1))
    assert gradient[1:] == [0.0, 0.0]


def test_no_tokens() -> None:
    value, gradient, metrics = shared([(-1.0, -2.0, False)], 0)
    assert (value, gradient, metrics.values()) == (0.0, [0.0], {})


def test_small_differences_keep_their_precision() -> None:
    # In float32, exp(d) - 1 - d of 1e-3 would be a multiple of 6e-8: off by a tenth.
    logprobs = torch.tensor([0.0], requires_grad=True)
    value, _ = kl_share(logprobs, torch.tensor([1e-3]), torch.tensor([True]), 1)
    value.backward()
    assert value.item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-math.expm1(1e-3), rel=1e-3)


@pytest.mark.parametrize("difference", [1e4, 90.0, 21.0, -90.0, -1e4])
def test_large_differences_stay_finite_and_pull_towards_the_reference(difference: float) -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    value, metrics = kl_share(logprobs, torch.tensor([difference]), torch.tensor([True]), 1)
    value.backward()
    assert logprobs.grad is not None
    assert math.isfinite(value.item())
    assert math.isfinite(logprobs.grad.item())
    assert math.copysign(1, -logprobs.grad.item()) == math.copysign(1, difference)
    assert math.isfinite(metrics.values()["policy/kl"])


def tensors(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size) for size in sizes]


def test_shapes_that_would_broadcast_are_refused() -> None:
    logprobs, reference = tensors(3, 1)
    with pytest.raises(GroupError, match=r"\(3,\).*\(1,\)"):
        kl_share(logprobs, reference, torch.ones(3, dtype=torch.bool), 3)


def test_a_part_larger_than_its_step_is_refused() -> None:
    logprobs, reference = tensors(3, 3)
    with pytest.raises(AssertionError, match="3 tokens"):
        kl_share(logprobs, reference, torch.ones(3, dtype=torch.bool), 2)
