"""Attention over sequences that lie one after another in a row, some with a common prefix.

Hugging Face models call attention by name. Under the name `SEGMENTS` it is the function here, which
reads a `Segments` from the keyword arguments of the model's forward call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from real_ray.errors import ModelError

SEGMENTS = "real_ray_segments"

_BLOCK_TOKENS = 192  # up to here one masked product is faster than one product a segment
_FULL_TOKENS = 64  # a block of as many takes no more segments that see nothing of it
_PLAIN_SCORES = 2**16  # of a head; up to here the steps one by one are faster than a fused kernel

Span = tuple[int, int, int, int]
"""A segment: its first token and the one after its last, and the same of its prefix."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Neighbouring tokens of a row that attend to a prefix and to each other."""

    start: int
    stop: int
    prefix_start: int  # of a prefix outside the block; empty where both are equal
    prefix_stop: int
    mask: Tensor | None  # [tokens, prefix + tokens] bool; None: causal


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Stretches of a row that attend to themselves, causally, and to a prefix in the same row.

    Each entry of ``spans`` is ``(start, stop, prefix_start, prefix_stop)``, in tokens; without a
    prefix the last two are equal. The stretches follow one another and cover the row.

    Example, a prompt of 3 tokens and its completions of 2 and 4:
    ``Segments(spans=((0, 3, 0, 0), (3, 5, 0, 3), (5, 9, 0, 3)), device=torch.device("cpu"))``
    """

    spans: tuple[Span, ...]
    device: torch.device
    _blocks: dict[int | None, tuple[Block, ...]] = field(default_factory=dict, init=False)

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """The row in blocks of neighbours, each for one product of queries and keys.

        Short segments share a block, with a mask, as long as what they see besides themselves is
        in it or is one prefix for all.

        Args:
            window: a token sees this many tokens of its sequence, itself included; None: all.
        """
        if window not in self._blocks:  # every layer asks
            runs: list[list[Span]] = []
            for span in self.spans:
                if runs and _joins(span, runs[-1]):
                    runs[-1].append(span)
                else:
                    runs.append([span])
            self._blocks[window] = tuple(_block(run, window, self.device) for run in runs)
        return self._blocks[window]

    @cached_property
    def variable_length(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """What variable-length kernels take: keys by index, cumulative lengths, longest lengths.

        Keys of a prefix are repeated for each of its segments. The kernels align a causal mask to
        the last query and the last key, which is what a segment behind its prefix needs.
        """
        keys = torch.cat([torch.cat([torch.arange(c, d), torch.arange(a, b)])
                          for a, b, c, d in self.spans])  # fmt: skip
        queries = torch.tensor([b - a for a, b, _, _ in self.spans])
        lengths = torch.tensor([b - a + d - c for a, b, c, d in self.spans])
        zero = torch.zeros(1, dtype=torch.long)

        def cumulative(counts: Tensor) -> Tensor:
            return torch.cat([zero, counts.cumsum(0)]).to(self.device, torch.int32)

        return (
            keys.to(self.device),
            cumulative(queries),
            cumulative(lengths),
            int(queries.max()),
            int(lengths.max()),
        )


def register() -> None:
    """Make `SEGMENTS` a value of `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(SEGMENTS, segment_attention)


def segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    segments: Segments,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that Hugging Face models call.

    Args:
        query: [1, heads, T, D].
        key, value: [1, key heads, T, D].
        sliding_window: a token sees this many tokens of its sequence, itself included.

    Returns:
        [1, T, heads, D].

    Raises:
        ModelError: the model asks for a kind of attention that is not offered here.
    """
    for name in ("softcap", "s_aux"):
        if rest.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses attention with `{name}`, which the learner cannot "
                "pack: set learner.packing: false and learner.share_prefix: false"
            )
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, segments, scaling=scaling, window=sliding_window), None
    gqa = query.shape[1] != key.shape[1]
    blocks = segments.blocks(sliding_window)
    lengths = [block.stop - block.start for block in blocks]
    # Split, not sliced: the gradient of a slice is as long as the row.
    queries, keys, values = (torch.split(t, lengths, dim=2) for t in (query, key, value))
    outputs = []
    for index, block in enumerate(blocks):
        k, v = keys[index], values[index]
        if block.prefix_stop > block.prefix_start:
            home = next(n for n, b in enumerate(blocks) if b.stop >= block.prefix_stop)
            first = block.prefix_start - blocks[home].start
            count = block.prefix_stop - block.prefix_start
            k = torch.cat([keys[home].narrow(2, first, count), k], dim=2)
            v = torch.cat([values[home].narrow(2, first, count), v], dim=2)
        if block.mask is not None and block.mask.numel() <= _PLAIN_SCORES:
            outputs.append(_plain(queries[index], k, v, block.mask, scaling=scaling))
            continue
        outputs.append(
            F.scaled_dot_product_attention(
                queries[index],
                k,
                v,
                attn_mask=block.mask,
                is_causal=block.mask is None,
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float | None
) -> Tensor:
    """Attention step by step, with scores in float32 or more: [1, heads, T, D]."""
    _, heads, length, width = query.shape
    key_heads = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    # Queries that share keys lie one after another.
    queries = query.reshape(key_heads, heads // key_heads * length, width)
    scores = queries.to(dtype) @ key[0].to(dtype).transpose(1, 2)
    scores = scores.view(key_heads, -1, *mask.shape) * (scaling or width**-0.5)
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1).to(value.dtype)
    return (weights.view(key_heads, -1, mask.shape[1]) @ value[0]).view(query.shape)


def _joins(span: Span, run: Sequence[Span]) -> bool:
    """Whether a segment can share a block with those before it."""
    start, prefix = run[0][0], run[0][2:]
    if span[1] - start > _BLOCK_TOKENS:
        return False
    has_prefix, run_has_prefix = span[3] > span[2], prefix[1] > prefix[0]
    if run_has_prefix:
        return span[2:] == prefix
    return span[2] >= start if has_prefix else run[-1][1] - start < _FULL_TOKENS


def _block(run: Sequence[Span], window: int | None, device: torch.device) -> Block:
    start, stop = run[0][0], run[-1][1]
    prefix_start, prefix_stop = run[0][2:]
    num_prefix = prefix_stop - prefix_start
    longest = max(span[1] - span[0] + span[3] - span[2] for span in run)
    mask = None
    if len(run) > 1 or num_prefix or (window is not None and longest > window):
        # Key columns: the prefix, then the block itself.
        mask = torch.zeros(stop - start, num_prefix + stop - start, dtype=torch.bool)
        for first, last, seen_first, seen_last in run:
            own = torch.arange(first, last) - start + num_prefix
            seen = torch.arange(seen_first, seen_last)
            seen = seen - prefix_start if num_prefix else seen - start
            columns = torch.cat([seen, own])
            query = torch.arange(len(seen), len(columns))[:, None]
            key = torch.arange(len(columns))[None, :]
            visible = key <= query
            if window is not None:
                visible &= query - key < window
            mask[(own - num_prefix)[:, None], columns[None, :]] = visible
        mask = mask.to(device)
    return Block(
        start=start, stop=stop, prefix_start=prefix_start, prefix_stop=prefix_stop, mask=mask
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Variable-length flash attention of torch, for GPUs in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    index, cumulative_q, cumulative_k, longest_q, longest_k = segments.variable_length
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1).index_select(0, index),
        value[0].transpose(0, 1).index_select(0, index),
        cumulative_q,
        cumulative_k,
        longest_q,
        longest_k,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]
