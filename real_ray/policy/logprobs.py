"""Log-probs of sampled tokens under a model, and the scores of completions.

Shapes: ``R`` rows of ``P`` prompt and ``C`` completion columns, ``V`` tokens in the vocabulary.
Arithmetic and results are float32, or float64 if the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from real_ray.batching import PaddedBatch
from real_ray.errors import GroupError
from real_ray.partial_metrics import PartialMetrics

_TILE_ELEMENTS = 2**24  # 64 MiB in float32: small beside any model, large enough to be fast


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorBatch:
    """A `PaddedBatch` as tensors on the device of the model.

    Example: ``TensorBatch.of(collate(groups, pad_token_id=0), torch.device("cpu"))``
    """

    input_ids: Tensor  # [R, P + C] int64
    attention_mask: Tensor  # [R, P + C] int64
    position_ids: Tensor  # [R, P + C] int64
    completion_mask: Tensor  # [R, C] bool
    generator_logprobs: Tensor  # [R, C] float32
    rewards: Tensor  # [G, N] float32

    @classmethod
    def of(cls, batch: PaddedBatch, device: torch.device) -> TensorBatch:
        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            input_ids=tensor(batch.input_ids),
            attention_mask=tensor(batch.attention_mask),
            position_ids=tensor(batch.position_ids),
            completion_mask=tensor(batch.completion_mask),
            generator_logprobs=tensor(batch.generator_logprobs),
            rewards=tensor(batch.rewards),
        )

    @property
    def completion_ids(self) -> Tensor:
        """[R, C] tokens, the padding included."""
        return self.input_ids[:, -self.completion_mask.shape[1] :]

    def by_group(self, rows: Tensor) -> Tensor:
        """[R] values of rows as [G, N] values of group members."""
        return rows.view(self.rewards.shape)


def completion_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, *, tile_elements: int = _TILE_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens, and the entropy, under ``logits / temperature``.

    The logits at column i predict column i + 1. So the C completion tokens need the last prompt
    column and all completion columns but the last: of the C + 1 columns given, the last is dropped.

    Beside ``logits``, and its gradient of the same dtype, float32 values of the whole vocabulary
    exist for one tile of rows and columns at a time.

    Args:
        logits: [R, C + 1, V], what a Hugging Face model returns with ``logits_to_keep=C + 1``.
        tokens: [R, C] token ids; any valid id where there is padding.
        temperature: of the sampling, above 0.
        tile_elements: size of a tile, in logits; a tile holds at least one token's logits.

    Returns:
        Log-probs [R, C] in the graph of ``logits``, and entropies in nats [R, C] without a graph.

    Raises:
        GroupError: the shapes do not fit each other.
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it must be above 0")
    num_rows, num_columns = tokens.shape
    if logits.ndim != 3 or logits.shape[:2] != (num_rows, num_columns + 1):
        raise GroupError(
            f"logits have shape {tuple(logits.shape)} but tokens have shape "
            f"{tuple(tokens.shape)}: expected logits of shape "
            f"[{num_rows}, {num_columns + 1}, vocabulary] (does the model honour logits_to_keep?)"
        )
    logprobs, entropy = _CompletionLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, tokens, temperature, tile_elements
    )
    return logprobs, entropy


def model_logprobs(
    model: Callable[..., Any], batch: TensorBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """One forward pass; `completion_logprobs` of the batch's completions.

    Args:
        model: a Hugging Face causal language model, or a DeepSpeed engine around one.
        temperature: of the sampling, above 0.

    Returns:
        Log-probs [R, C] with a graph, entropies [R, C] without. Both are meaningless at padding.
    """
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.completion_mask.shape[1] + 1,
        use_cache=False,
    )
    return completion_logprobs(output.logits, batch.completion_ids, temperature)


def sequence_scores(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Score of each completion: the mean log-ratio of its tokens (s of arXiv 2602.05630).

    Args:
        logprobs: [R, C] of the policy; the only input that gets a gradient.
        old_logprobs: [R, C] of pi_old.
        mask: [R, C] bool, the tokens that count.

    Returns:
        [R]. A row without tokens scores 0: exclude it from the loss, it is not a negative.

    Raises:
        GroupError: the shapes differ.
    """
    _check_same_shape(logprobs, old_logprobs, mask)
    ratios = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0)
    return ratios.sum(dim=1) / mask.sum(dim=1).clamp_min(1)


@torch.no_grad()
def token_metrics(
    logprobs: Tensor, generator_logprobs: Tensor, entropy: Tensor, mask: Tensor
) -> PartialMetrics:
    """Mismatch of learner and generator, and entropy, over the tokens of ``mask``.

    ``logprobs/mismatch_mean`` and ``logprobs/mismatch_max`` of the absolute difference,
    ``logprobs/mismatch_k3``: the k3 estimate of KL(generator || learner),
    mean of ``exp(d) - 1 - d`` with d = learner - generator; ``policy/entropy`` in nats.

    Args:
        logprobs, generator_logprobs, entropy: [R, C].
        mask: [R, C] bool.

    Raises:
        GroupError: the shapes differ.
    """
    _check_same_shape(logprobs, generator_logprobs, mask)
    difference = (logprobs - generator_logprobs)[mask].cpu().double()
    count = float(difference.numel())
    return PartialMetrics(
        means={
            "logprobs/mismatch_mean": (float(difference.abs().sum()), count),
            "logprobs/mismatch_k3": (float((difference.expm1() - difference).sum()), count),
            "policy/entropy": (float(entropy[mask].cpu().double().sum()), count),
        },
        maxima={"logprobs/mismatch_max": float(difference.abs().max()) if count else float("-inf")},
    )


class _CompletionLogprobs(torch.autograd.Function):
    """Softmax over the vocabulary, tile by tile; the backward pass computes it again.

    Autograd would keep two float32 copies of the logits. Checkpointing its tiles saves that
    memory too, but takes twice the time of this, which works in place.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, tile_elements: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropy, log_norms = (
            torch.empty(tokens.shape, dtype=dtype, device=logits.device) for _ in range(3)
        )
        for tile in _tiles(logits, tile_elements):
            values = logits[tile].to(dtype, copy=True).div_(temperature)
            log_norms[tile] = torch.logsumexp(values, dim=-1)
            values.sub_(log_norms[tile].unsqueeze(-1))
            logprobs[tile] = values.gather(-1, tokens[tile].unsqueeze(-1)).squeeze(-1)
            probs = values.exp()
            # 0 * -inf, from a token that the model rules out, must be 0 and not NaN.
            values.clamp_min_(torch.finfo(dtype).min)
            entropy[tile] = probs.mul_(values).sum(dim=-1).neg_()
        ctx.save_for_backward(logits, tokens, log_norms)
        ctx.temperature, ctx.tile_elements = temperature, tile_elements
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens, log_norms = ctx.saved_tensors
        grad = (grad / ctx.temperature).unsqueeze(-1)
        logits_grad = torch.empty_like(logits)
        logits_grad[:, -1] = 0
        for tile in _tiles(logits, ctx.tile_elements):
            values = logits[tile].to(grad.dtype, copy=True).div_(ctx.temperature)
            values.sub_(log_norms[tile].unsqueeze(-1)).exp_().mul_(-grad[tile])
            values.scatter_add_(-1, tokens[tile].unsqueeze(-1), grad[tile])
            logits_grad[tile] = values
        return logits_grad, None, None, None


def _tiles(logits: Tensor, tile_elements: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the tiles that cover all of ``logits`` [R, C + 1, V] but column C."""
    num_rows, num_columns, vocabulary = logits.shape[0], logits.shape[1] - 1, logits.shape[2]
    height = max(1, tile_elements // (num_columns * vocabulary))
    width = max(1, min(num_columns, tile_elements // vocabulary))
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, width):
            yield (
                slice(row, min(row + height, num_rows)),
                slice(column, min(column + width, num_columns)),
            )


def _check_same_shape(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> None:
    if not logprobs.shape == old_logprobs.shape == mask.shape:
        raise GroupError(
            f"log-probs of shape {tuple(logprobs.shape)}, old log-probs of shape "
            f"{tuple(old_logprobs.shape)} and a mask of shape {tuple(mask.shape)}: "
            "all three must be [rows, completion columns] of the same batch"
        )
