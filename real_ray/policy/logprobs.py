"""Log-probs of given tokens from hidden states, without their logits in memory.

Shapes: ``T`` tokens, ``H`` hidden units, ``V`` tokens in the vocabulary. Arithmetic and results
are float32, or float64 if the hidden states are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from real_ray.partial_metrics import PartialMetrics
from real_ray.policy.products import bfloat16_factors

_TILE_ELEMENTS = 2**24  # 64 MiB in float32: small beside any model, large enough to be fast


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    *,
    tile_elements: int = _TILE_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``tokens``, and the entropy, under ``(hidden @ weight.T + bias) / temperature``.

    Logits exist for one tile of tokens at a time; the backward pass computes them again, unless
    one tile holds them all.

    Args:
        hidden: [T, H], the states that predict the tokens.
        weight: [V, H] of the output layer.
        bias: [V], or None.
        tokens: [T] int64.
        temperature: of the sampling, above 0.
        tile_elements: size of a tile, in logits; a tile holds at least one token's logits.

    Returns:
        Log-probs [T] in the graph of ``hidden``, ``weight`` and ``bias``, and entropies in nats
        [T] without a graph.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it must be above 0")
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, (temperature, tile_elements)
    )
    return logprobs, entropy


@torch.no_grad()
def token_metrics(
    logprobs: Tensor, generator_logprobs: Tensor, entropy: Tensor, staleness: Tensor
) -> PartialMetrics:
    """Mismatch of learner and generator, and entropy, over the tokens of a micro-batch.

    ``logprobs/mismatch_mean`` and ``logprobs/mismatch_max`` of the absolute difference,
    ``logprobs/mismatch_k3``: the k3 estimate of KL(generator || learner),
    mean of ``exp(d) - 1 - d`` with d = learner - generator; each also split by staleness, as in
    ``logprobs/mismatch_mean_staleness_1``. ``policy/entropy`` in nats.

    Args:
        logprobs, generator_logprobs, entropy: [T].
        staleness: [T] int64, policy versions between the sampling of a token and now.
    """
    difference = (logprobs - generator_logprobs).cpu().double()
    staleness = staleness.cpu()
    parts = [PartialMetrics(means={"policy/entropy": _mean(entropy.cpu().double())})]
    for name, chosen in [
        ("", difference),
        *((f"_staleness_{k}", difference[staleness == k]) for k in sorted(set(staleness.tolist()))),
    ]:
        parts.append(
            PartialMetrics(
                means={
                    f"logprobs/mismatch_mean{name}": _mean(chosen.abs()),
                    f"logprobs/mismatch_k3{name}": _mean(chosen.expm1() - chosen),
                },
                maxima={
                    f"logprobs/mismatch_max{name}": float(chosen.abs().max())
                    if len(chosen)
                    else float("-inf")
                },
            )
        )
    return PartialMetrics.merge(parts)


class _LinearLogprobs(torch.autograd.Function):
    """Output layer and softmax, tile by tile."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        settings: tuple[float, int],
    ) -> tuple[Tensor, Tensor]:
        temperature, tile_elements = settings
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, log_norms = (
            torch.empty(tokens.shape, dtype=dtype, device=hidden.device) for _ in range(3)
        )
        logits_of = _Logits(weight, bias, temperature, dtype)
        tiles = _tiles(len(tokens), len(weight), tile_elements)
        only_tile = None
        for tile in tiles:
            values = logits_of(hidden[tile])
            top = values.amax(dim=-1)
            values.sub_(top.unsqueeze(-1))
            chosen = values.gather(-1, tokens[tile].unsqueeze(-1)).squeeze(-1)
            probs = values.exp()
            total = probs.sum(dim=-1)  # which they are still to be divided by
            log_norms[tile] = top + total.log()
            logprobs[tile] = chosen - total.log()
            if bias is not None:
                # 0 * -inf, from a token that the model rules out, must be 0 and not NaN.
                values.clamp_min_(torch.finfo(dtype).min)
            entropy[tile] = total.log() - torch.linalg.vecdot(probs, values) / total
            if len(tiles) == 1:  # one may stay, so it is not computed twice
                only_tile = probs.div_(total.unsqueeze(-1))
            del values, probs  # before the next tile is there
        ctx.save_for_backward(hidden, weight, bias, tokens, log_norms, only_tile)
        ctx.temperature, ctx.tiles = temperature, tiles
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, log_norms, only_tile = ctx.saved_tensors
        dtype = log_norms.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        logits_of = None if only_tile is not None else _Logits(weight, bias, ctx.temperature, dtype)
        scaled = (grad.to(dtype) / ctx.temperature).unsqueeze(-1)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # The tiles add up in float32; a sum in bfloat16 would lose the small ones.
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        for tile in ctx.tiles:
            if logits_of is not None:
                probs = logits_of(hidden[tile]).sub_(log_norms[tile].unsqueeze(-1)).exp_()
                values = probs.mul_(-scaled[tile])
            else:
                values = only_tile * -scaled[tile]
            values.scatter_add_(-1, tokens[tile].unsqueeze(-1), scaled[tile])
            if wants_bias:
                bias_grad = _plus(bias_grad, values.sum(dim=0))
            # A factor of weights in bfloat16 is rounded to it, a sum of products never.
            values = values.to(weight.dtype)
            if hidden_grad is not None:
                hidden_grad[tile] = values @ weight
            if wants_weight:
                part = values.to(hidden.dtype).T @ hidden[tile]
                weight_grad = part if len(ctx.tiles) == 1 else _plus(weight_grad, part.to(dtype))
            del values
        return (
            hidden_grad,
            _gradient(weight_grad, weight) if wants_weight else None,
            _gradient(bias_grad, bias) if wants_bias else None,
            None,
            None,
        )


class _Logits:
    """Logits of hidden states, divided by the temperature, added up and returned in ``dtype``."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype
    ) -> None:
        self._in_bfloat16 = weight.dtype == torch.bfloat16
        # GPUs multiply bfloat16 into float32 directly; elsewhere it is converted, once.
        self._weight = weight if weight.is_cuda else weight.to(dtype)
        self._bias = None if bias is None else bias.to(dtype)
        self._temperature = temperature
        self._dtype = dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._product(hidden)
        if self._bias is not None:
            logits += self._bias
        return logits.div_(self._temperature)

    def _product(self, hidden: Tensor) -> Tensor:
        if self._weight.is_cuda and self._in_bfloat16:
            return torch.mm(hidden.to(torch.bfloat16), self._weight.T, out_dtype=self._dtype)
        if self._in_bfloat16 and hidden.dtype == torch.bfloat16:
            with bfloat16_factors():
                return hidden.to(self._dtype) @ self._weight.T
        return hidden.to(self._dtype) @ self._weight.T


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _gradient(total: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if total is None else total.to(of.dtype)


def _tiles(num_tokens: int, vocabulary: int, tile_elements: int) -> list[slice]:
    height = max(1, tile_elements // vocabulary)
    return [slice(n, min(n + height, num_tokens)) for n in range(0, num_tokens, height)]


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.sum()), float(values.numel())
