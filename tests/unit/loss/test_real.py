"""The REAL loss against a float64 implementation of arXiv 2602.05630, eq. 8, written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from real_ray.errors import GroupError
from real_ray.loss import group_loss, group_weights

Group = tuple[list[float], list[bool]]


def reference_loss(scores: Sequence[float], positive: Sequence[bool], tau: float) -> float:
    if all(positive) or not any(positive):
        return 0.0
    pos = math.fsum(math.exp(-s / tau) for s, y in zip(scores, positive, strict=True) if y)
    neg = math.fsum(math.exp(s / tau) for s, y in zip(scores, positive, strict=True) if not y)
    return math.log1p(pos) + math.log1p(neg)


def reference_weights(scores: Sequence[float], positive: Sequence[bool], tau: float) -> list[float]:
    if all(positive) or not any(positive):
        return [0.0] * len(scores)
    pos = 1 + sum(math.exp(-s / tau) for s, y in zip(scores, positive, strict=True) if y)
    neg = 1 + sum(math.exp(s / tau) for s, y in zip(scores, positive, strict=True) if not y)
    return [
        -math.exp(-s / tau) / pos / tau if y else math.exp(s / tau) / neg / tau
        for s, y in zip(scores, positive, strict=True)
    ]


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def autograd(
    scores: Tensor, positive: Tensor, tau: float, included: Tensor | None = None
) -> Tensor:
    scores = scores.clone().requires_grad_()
    group_loss(scores, positive, tau, included).sum().backward()
    assert scores.grad is not None
    return scores.grad


def groups(bound: float = 100.0) -> st.SearchStrategy[Group]:
    score = st.floats(-bound, bound, allow_subnormal=False)
    member = st.tuples(score, st.booleans())
    return st.lists(member, min_size=2, max_size=9).map(
        lambda members: ([s for s, _ in members], [y for _, y in members])
    )


taus = st.floats(0.2, 5.0)
no_deadline = settings(deadline=None)  # torch's first backward takes long

V1: tuple[list[float], list[int]] = ([0.10, -0.20, 0.30, -0.05], [1, 1, 0, 0])
V6 = ([0.1, -0.2, 0.3, 0.0], [1, 1, 1, 1])
VECTORS = {
    "V1": (*V1, 0.5, 2.512707858, [-0.494618360, -0.901253412, 0.977805315, 0.485563750]),
    "V1, tau 1": (*V1, 1.0, 2.334083242, [-0.289433110, -0.390693833, 0.408913277, 0.288156316]),
    "V2": ([0.0] * 8, [1] * 4 + [0] * 4, 0.5, 3.218875825, [-0.4] * 4 + [0.4] * 4),
    "V3": ([0.0] * 8, [1] + [0] * 7, 0.5, 2.772588722, [-1.0] + [0.25] * 7),
    "V5": ([0.0, 0.0], [1, 0], 0.5, 1.386294361, [-1.0, 1.0]),
    "V6": (*V6, 0.5, 0.0, [0.0] * 4),
    "V7": ([0.1, -0.2, 0.3, 0.0], [0, 0, 0, 0], 0.5, 0.0, [0.0] * 4),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str, dtype: torch.dtype) -> None:
    scores, positive, tau, loss, weights = VECTORS[name]
    s, y = torch.tensor([scores], dtype=dtype), torch.tensor([positive], dtype=torch.bool)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6

    assert group_loss(s, y, tau).tolist() == pytest.approx([loss], abs=tolerance)
    assert group_weights(s, y, tau)[0].tolist() == pytest.approx(weights, abs=tolerance)
    assert autograd(s, y, tau)[0].tolist() == pytest.approx(weights, abs=tolerance)
    assert reference_loss(scores, [bool(v) for v in positive], tau) == pytest.approx(loss)


def test_the_two_terms_of_v1() -> None:
    s = f64([V1[0]])
    # A lone far-away negative (positive) adds exactly log(1 + 0) to the term of the other class.
    far = f64([[-1e3]]), f64([[1e3]])
    only_pos = group_loss(torch.cat([s[:, :2], far[0]], 1), torch.tensor([[1, 1, 0]]), 0.5)
    only_neg = group_loss(torch.cat([far[1], s[:, 2:]], 1), torch.tensor([[1, 0, 0]]), 0.5)
    assert only_pos.item() == pytest.approx(1.197115985, abs=1e-9)
    assert only_neg.item() == pytest.approx(1.315591873, abs=1e-9)


def test_token_level_gradients_of_v1() -> None:
    tokens = [
        f64(r).requires_grad_()
        for r in ([0.2, 0], [-0.3, -0.1, -0.2], [0.5, 0.1, 0.3, 0.3], [-0.05])
    ]
    scores = torch.stack([t.mean() for t in tokens]).unsqueeze(0)
    group_loss(scores, torch.tensor([V1[1]]), 0.5).sum().backward()
    expected = [-0.247309180, -0.300417804, 0.244451329, 0.485563750]
    for t, value in zip(tokens, expected, strict=True):
        assert t.grad is not None
        assert t.grad.tolist() == pytest.approx([value] * len(t), abs=1e-9)


def test_backward_works_when_every_group_is_one_sided() -> None:
    s = torch.randn(3, 4, requires_grad=True)
    losses = group_loss(s, torch.tensor([[1] * 4, [0] * 4, [1] * 4]), 0.5)
    losses.sum().backward()
    assert losses.tolist() == [0.0] * 3
    assert s.grad is not None
    assert torch.equal(s.grad, torch.zeros_like(s))


def test_no_groups() -> None:
    s = torch.zeros(0, 4, requires_grad=True)
    loss = group_loss(s, torch.zeros(0, 4, dtype=torch.bool), 0.5).sum()
    loss.backward()
    assert loss.item() == 0.0


# The score of an excluded member, whose tokens are all masked, may be anything.
@pytest.mark.parametrize("score", [-0.05, 0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("label", [0, 1])
def test_an_excluded_member_is_in_neither_class(score: float, label: int) -> None:
    s = f64([[0.10, -0.20, 0.30, score]])
    y, included = torch.tensor([[1, 1, 0, label]]), torch.tensor([[True, True, True, False]])
    assert group_loss(s, y, 0.5, included).item() == pytest.approx(2.234603936, abs=1e-9)
    expected = reference_weights([0.10, -0.20, 0.30], [True, True, False], 0.5)
    for weights in (group_weights(s, y, 0.5, included), autograd(s, y, 0.5, included)):
        assert weights[0, :3].tolist() == pytest.approx(expected)
        assert weights[0, 3].item() == 0.0


def test_two_sided_is_decided_after_the_exclusion() -> None:
    y = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])
    included = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0], [1, 1, 1]])
    s = torch.randn(4, 3)
    losses = group_loss(s, y, 0.5, included)
    assert (losses != 0).tolist() == [False, False, True, False]
    weights = group_weights(s, y, 0.5, included)
    assert torch.equal(weights[[0, 1, 3]], torch.zeros(3, 3))
    assert torch.equal(autograd(s, y, 0.5, included)[[0, 1, 3]], torch.zeros(3, 3))


@no_deadline
@given(groups(), taus)
def test_equals_the_formula(group: Group, tau: float) -> None:
    scores, positive = group
    s, y = f64([scores]), torch.tensor([positive])
    assert group_loss(s, y, tau).item() == pytest.approx(
        reference_loss(scores, positive, tau), rel=1e-12, abs=1e-12
    )
    assert group_weights(s, y, tau)[0].tolist() == pytest.approx(
        reference_weights(scores, positive, tau), rel=1e-9, abs=1e-12
    )


@no_deadline
@given(groups(1e4), taus)
def test_closed_form_equals_autograd(group: Group, tau: float) -> None:
    s, y = f64([group[0]]), torch.tensor([group[1]])
    torch.testing.assert_close(group_weights(s, y, tau), autograd(s, y, tau), rtol=1e-9, atol=1e-12)


@no_deadline
@given(groups(), taus)
def test_weights_are_bounded(group: Group, tau: float) -> None:
    y = torch.tensor([group[1]])
    magnitude = group_weights(f64([group[0]]), y, tau).abs()
    bound = (1 + 1e-12) / tau
    assert (magnitude <= bound).all()
    assert magnitude[y].sum() <= bound
    assert magnitude[~y].sum() <= bound


@no_deadline
@given(groups(), taus)
def test_a_worse_classified_member_never_has_the_smaller_weight(group: Group, tau: float) -> None:
    s, y = f64(group[0]), torch.tensor(group[1])
    weights = group_weights(s.unsqueeze(0), y.unsqueeze(0), tau)[0]
    pull = -weights[y][s[y].argsort(descending=True)]
    push = weights[~y][s[~y].argsort()]
    rounding = -1e-14
    assert (pull.diff() >= rounding).all()
    assert (push.diff() >= rounding).all()


def test_a_clearly_worse_member_has_the_larger_weight() -> None:
    weights = group_weights(f64([[1.0, -1.0, 1.0, -1.0]]), torch.tensor([[1, 1, 0, 0]]), 0.5)[0]
    assert weights[1] < weights[0] < 0 < weights[3] < weights[2]


@no_deadline
@given(groups().flatmap(lambda g: st.tuples(st.just(g), st.permutations(range(len(g[0]))))), taus)
def test_order_of_the_members_does_not_matter(case: tuple[Group, list[int]], tau: float) -> None:
    (scores, positive), order = case
    s, y = f64([scores]), torch.tensor([positive])
    torch.testing.assert_close(group_loss(s[:, order], y[:, order], tau), group_loss(s, y, tau))
    torch.testing.assert_close(
        group_weights(s[:, order], y[:, order], tau), group_weights(s, y, tau)[:, order]
    )


@no_deadline
@given(groups(), taus)
def test_swapping_classes_and_signs_leaves_the_loss(group: Group, tau: float) -> None:
    s, y = f64([group[0]]), torch.tensor([group[1]])
    torch.testing.assert_close(group_loss(-s, ~y, tau), group_loss(s, y, tau))
    torch.testing.assert_close(group_weights(-s, ~y, tau), -group_weights(s, y, tau))


@no_deadline
@given(groups(1e4), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_finite_for_large_scores_in_low_precision(group: Group, dtype: torch.dtype) -> None:
    s, y = torch.tensor([group[0]], dtype=dtype), torch.tensor([group[1]])
    loss, weights = group_loss(s, y, 0.5), group_weights(s, y, 0.5)
    assert loss.dtype == weights.dtype == torch.float32
    assert loss.isfinite().all()
    assert weights.isfinite().all()
    assert autograd(s, y, 0.5).isfinite().all()
    # Only the input is rounded: the arithmetic is that of float32.
    assert torch.equal(loss, group_loss(s.float(), y, 0.5))


def test_float64_stays_float64_and_weights_have_no_graph() -> None:
    s = f64([V1[0]]).requires_grad_()
    y = torch.tensor([V1[1]])
    assert group_loss(s, y, 0.5).dtype == torch.float64
    assert group_loss(s, y, 0.5).requires_grad
    assert not group_weights(s, y, 0.5).requires_grad


def test_weights_give_the_gradient_of_the_loss_from_split_members() -> None:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    features = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    y = torch.tensor([[1, 0, 0, 1, 0, 1]])
    group_loss((features @ theta).unsqueeze(0), y, 0.5).sum().backward()
    assert theta.grad is not None
    whole, theta.grad = theta.grad, None

    weights = group_weights((features @ theta).unsqueeze(0), y, 0.5)[0]
    for members in ([0, 1], [2, 3, 4], [5]):
        (weights[members] * (features[members] @ theta)).sum().backward()
    torch.testing.assert_close(theta.grad, whole)


LossFunction = Callable[..., Tensor]


@pytest.mark.parametrize("function", [group_loss, group_weights])
class TestRefusals:
    def test_different_shapes(self, function: LossFunction) -> None:
        y = torch.zeros(2, 3, dtype=torch.bool)
        with pytest.raises(GroupError, match=r"\(2, 4\).*\(2, 3\)"):
            function(torch.zeros(2, 4), y, 0.5)
        with pytest.raises(GroupError, match=r"\(2, 3\).*\(1, 3\)"):
            function(torch.zeros(2, 3), y, 0.5, torch.ones(1, 3, dtype=torch.bool))

    @pytest.mark.parametrize("shape", [(4,), (2, 1), (2, 0), (2, 2, 2)])
    def test_not_groups_of_two_or_more(
        self, function: LossFunction, shape: tuple[int, ...]
    ) -> None:
        with pytest.raises(GroupError, match="at least 2"):
            function(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), 0.5)

    @pytest.mark.parametrize("tau", [0.0, -0.5, math.nan, math.inf])
    def test_tau(self, function: LossFunction, tau: float) -> None:
        with pytest.raises(ValueError, match=f"tau is {tau}"):
            function(torch.zeros(1, 2), torch.tensor([[1, 0]]), tau)

    def test_labels_other_than_0_and_1(self, function: LossFunction) -> None:
        with pytest.raises(ValueError, match="positive has the value -1"):
            function(torch.zeros(1, 2), torch.tensor([[1, -1]]), 0.5)
        with pytest.raises(ValueError, match="included has the value 2"):
            function(torch.zeros(1, 2), torch.tensor([[1, 0]]), 0.5, torch.tensor([[1, 2]]))
        with pytest.raises(ValueError, match="float32"):
            function(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), 0.5)

    def test_scores_that_are_integers(self, function: LossFunction) -> None:
        with pytest.raises(ValueError, match="int64"):
            function(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 0]]), 0.5)
