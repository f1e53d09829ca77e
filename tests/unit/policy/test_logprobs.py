"""Log-probs from hidden states, against a plain log-softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from real_ray.partial_metrics import PartialMetrics
from real_ray.policy import linear_logprobs, token_metrics

T, H, V = 7, 5, 11
TILES = [1, V, 2 * V, 3 * V - 1, T * V, 10**9]  # one token, two, and all of them
each_tile = pytest.mark.parametrize("tile_elements", TILES)
with_and_without_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])


def layer(
    *, has_bias: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight, bias, tokens."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    hidden, weight, bias = leaf(T, H), leaf(V, H), leaf(V)
    tokens = torch.randint(V, (T,), generator=generator)
    return hidden, weight, bias if has_bias else None, tokens


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    distribution = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(-1, tokens[:, None])[:, 0], entropy


class TestLinearLogprobs:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
    @each_tile
    @with_and_without_bias
    def test_values_and_gradients(
        self, has_bias: bool, tile_elements: int, temperature: float
    ) -> None:
        *leaves, tokens = layer(has_bias=has_bias)
        logprobs, entropy = linear_logprobs(
            *leaves, tokens, temperature, tile_elements=tile_elements
        )
        expected, expected_entropy = plain(*leaves, tokens, temperature)
        torch.testing.assert_close(logprobs, expected)
        torch.testing.assert_close(entropy, expected_entropy)
        assert not entropy.requires_grad

        weights = torch.linspace(-2, 3, T, dtype=torch.float64)
        trained = [leaf for leaf in leaves if leaf is not None]
        torch.testing.assert_close(
            torch.autograd.grad((logprobs * weights).sum(), trained),
            torch.autograd.grad((expected * weights).sum(), trained),
        )

    @with_and_without_bias
    def test_gradients_are_the_derivatives(self, has_bias: bool) -> None:
        *leaves, tokens = layer(has_bias=has_bias)

        def logprobs(*leaves: Tensor | None) -> Tensor:
            return linear_logprobs(*leaves, tokens, 0.6, tile_elements=2 * V)[0]

        assert torch.autograd.gradcheck(logprobs, leaves)

    @pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)])
    def test_only_what_is_trained_gets_a_gradient(self, trained: tuple[int, ...]) -> None:
        *leaves, tokens = layer(has_bias=True)
        expected = torch.autograd.grad(plain(*leaves, tokens, 0.6)[0].sum(), leaves)
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in trained)
        linear_logprobs(*leaves, tokens, 0.6, tile_elements=V)[0].sum().backward()
        for index, leaf in enumerate(leaves):
            if index in trained:
                torch.testing.assert_close(leaf.grad, expected[index])
            else:
                assert leaf.grad is None

    @each_tile
    def test_bfloat16_is_computed_in_float32(self, tile_elements: int) -> None:
        *leaves, tokens = layer(has_bias=True, dtype=torch.bfloat16)
        logprobs, entropy = linear_logprobs(*leaves, tokens, 0.6, tile_elements=tile_elements)
        assert logprobs.dtype == entropy.dtype == torch.float32
        found = torch.autograd.grad(logprobs.sum(), leaves)
        assert {gradient.dtype for gradient in found} == {torch.bfloat16}

        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected, expected_entropy = plain(*doubles, tokens, 0.6)
        torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
        for ours, exact in zip(found, torch.autograd.grad(expected.sum(), doubles), strict=True):
            # Factors and result are rounded, half a step of bfloat16 with its 8 bits, sums are not.
            scale = float(exact.abs().max())
            torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=2**-8 * scale)

    def test_large_products_of_bfloat16_are_computed_in_float32(self) -> None:
        """Large enough for other kernels. Rounded logits would be off by 0.06."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(40, 64, generator=generator).bfloat16()
        weight = torch.randn(512, 64, generator=generator).bfloat16()
        tokens = torch.randint(512, (40,), generator=generator)
        logprobs, entropy = linear_logprobs(hidden, weight, None, tokens, 0.6)
        expected, expected_entropy = plain(hidden.double(), weight.double(), None, tokens, 0.6)
        torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-4)

    def test_small_shares_of_many_tiles_add_up_in_bfloat16(self) -> None:
        """Each token adds a 1000th: a sum in bfloat16 would stop growing at a quarter."""
        count = 1000
        hidden = torch.full((count, 1), 1e-3, dtype=torch.bfloat16)
        weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.zeros(count, dtype=torch.long)
        linear_logprobs(hidden, weight, None, tokens, 1.0, tile_elements=2)[0].sum().backward()
        assert weight.grad is not None
        assert weight.grad.flatten().tolist() == pytest.approx([0.5, -0.5], rel=0.01)

    def test_a_token_that_is_ruled_out_leaves_entropy_and_gradient_finite(self) -> None:
        hidden = torch.zeros(1, 2, requires_grad=True)
        weight = torch.ones(3, 2, requires_grad=True)
        bias = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
        logprobs, entropy = linear_logprobs(hidden, weight, bias, torch.tensor([0]), 1.0)
        assert logprobs.item() == pytest.approx(-math.log(2))
        assert entropy.item() == pytest.approx(math.log(2))
        gradients = torch.autograd.grad(logprobs.sum(), [hidden, weight, bias])
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert gradients[2].tolist() == pytest.approx([0.5, -0.5, 0.0])

    def test_no_tokens(self) -> None:
        hidden = torch.zeros(0, H, requires_grad=True)
        weight = torch.ones(V, H, requires_grad=True)
        logprobs, entropy = linear_logprobs(
            hidden, weight, None, torch.zeros(0, dtype=torch.long), 1.0
        )
        logprobs.sum().backward()
        assert logprobs.shape == entropy.shape == (0,)
        assert weight.grad is not None
        assert weight.grad.abs().sum() == 0

    def test_no_tensor_is_as_large_as_the_logits(self) -> None:
        num_tokens, hidden_size, vocabulary, tile_elements = 60, 4, 1000, 5000
        hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
        weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
        tokens = torch.randint(vocabulary, (num_tokens,))
        with LargestOutput() as seen:
            logprobs, _ = linear_logprobs(
                hidden, weight, None, tokens, 1.0, tile_elements=tile_elements
            )
            logprobs.sum().backward()
        assert seen.elements == tile_elements
        with LargestOutput() as seen:
            plain(hidden, weight, None, tokens, 1.0)
        assert seen.elements == num_tokens * vocabulary

    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
    def test_temperature(self, temperature: float) -> None:
        *leaves, tokens = layer(has_bias=False)
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            linear_logprobs(*leaves, tokens, temperature)


class LargestOutput(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def k3(difference: float) -> float:
    return math.exp(difference) - 1 - difference


class TestTokenMetrics:
    learner = torch.tensor([-1.0, -2.0, -0.5])
    generator = torch.tensor([-1.1, -1.8, -0.5])  # differences 0.1, -0.2, 0
    entropy = torch.tensor([1.0, 2.0, 3.0])
    staleness = torch.tensor([0, 2, 2])

    def test_values(self) -> None:
        metrics = token_metrics(self.learner, self.generator, self.entropy, self.staleness)
        assert metrics.values() == pytest.approx(
            {
                "policy/entropy": 2.0,
                "logprobs/mismatch_mean": 0.1,
                "logprobs/mismatch_max": 0.2,
                "logprobs/mismatch_k3": (k3(0.1) + k3(-0.2)) / 3,
                "logprobs/mismatch_mean_staleness_0": 0.1,
                "logprobs/mismatch_max_staleness_0": 0.1,
                "logprobs/mismatch_k3_staleness_0": k3(0.1),
                "logprobs/mismatch_mean_staleness_2": 0.1,
                "logprobs/mismatch_max_staleness_2": 0.2,
                "logprobs/mismatch_k3_staleness_2": k3(-0.2) / 2,
            },
            abs=1e-6,
        )

    def test_tokens_of_one_version_are_split_into_one_part(self) -> None:
        metrics = token_metrics(
            self.learner, self.generator, self.entropy, torch.ones(3, dtype=torch.long)
        ).values()
        for name in ("mean", "max", "k3"):
            whole = metrics.pop(f"logprobs/mismatch_{name}")
            assert metrics.pop(f"logprobs/mismatch_{name}_staleness_1") == whole
        assert list(metrics) == ["policy/entropy"]

    @given(st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 3), st.booleans()), min_size=1))
    def test_parts_merge_to_the_whole(self, drawn: list[tuple[float, int, bool]]) -> None:
        learner, staleness, is_first = (torch.tensor(values) for values in zip(*drawn, strict=True))
        zero = torch.zeros_like(learner)
        whole = token_metrics(learner, zero, learner.abs(), staleness).values()
        parts = [
            token_metrics(learner[p], zero[p], learner[p].abs(), staleness[p])
            for p in (is_first, ~is_first)
        ]
        assert PartialMetrics.merge(parts).values() == pytest.approx(whole)

    def test_no_tokens_no_keys(self) -> None:
        nothing = torch.zeros(0)
        metrics = token_metrics(nothing, nothing, nothing, torch.zeros(0, dtype=torch.long))
        assert metrics.values() == {}
