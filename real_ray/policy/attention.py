"""Attention over sequences that lie one after another in a row, some with a common prefix.

Hugging Face models call attention by name. Under the name `SEGMENTS` it is the function here, which
reads a `Segments` from the keyword arguments of the model's forward call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from real_ray.errors import ModelError

SEGMENTS = "real_ray_segments"

_DENSE_TOKENS = 512  # up to here one masked product is faster than one product a segment


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Stretches of a row that attend to themselves, causally, and to a prefix in the same row.

    Each entry of ``spans`` is ``(start, stop, prefix_start, prefix_stop)``, in tokens; without a
    prefix the last two are equal. The stretches follow one another and cover the row.

    Example, a prompt of 3 tokens and its completions of 2 and 4:
    ``Segments(spans=((0, 3, 0, 0), (3, 5, 0, 3), (5, 9, 0, 3)), device=torch.device("cpu"))``
    """

    spans: tuple[tuple[int, int, int, int], ...]
    device: torch.device

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.spans[-1][1]

    @cached_property
    def mask(self) -> Tensor:
        """[1, 1, T, T] bool: which token (third axis) attends to which (last)."""
        mask = torch.zeros(self.length, self.length, dtype=torch.bool)
        for start, stop, prefix_start, prefix_stop in self.spans:
            mask[start:stop, start:stop] = True
            mask[start:stop, prefix_start:prefix_stop] = True
        return mask.tril_()[None, None].to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of each token in its sequence, the prefix included."""
        return torch.cat([torch.arange(b - a) + (d - c) for a, b, c, d in self.spans]).to(
            self.device
        )

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
        return _flash(query, key, value, segments, scaling, sliding_window), None
    gqa = query.shape[1] != key.shape[1]
    if segments.length <= _DENSE_TOKENS:
        mask = segments.mask
        if sliding_window is not None:
            distance = segments.positions[:, None] - segments.positions[None, :]
            mask = mask & (distance < sliding_window)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa
        )
        return out.transpose(1, 2), None
    outputs = []
    for start, stop, prefix_start, prefix_stop in segments.spans:
        keys, values = (
            torch.cat([t[:, :, prefix_start:prefix_stop], t[:, :, start:stop]], dim=2)
            if prefix_stop > prefix_start
            else t[:, :, start:stop]
            for t in (key, value)
        )
        own_mask = _causal(stop - start, keys.shape[2], sliding_window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                keys,
                values,
                attn_mask=own_mask,
                is_causal=own_mask is None,
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor | None:
    """[queries, keys] bool, aligned at the last of both; None: plain causal attention."""
    if num_queries == num_keys and (window is None or num_keys <= window):
        return None
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    mask = key <= query
    return mask if window is None else mask & (query - key < window)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
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
