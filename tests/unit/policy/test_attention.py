"""Attention over segments, against a softmax that is written out in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from real_ray.errors import ModelError
from real_ray.policy.attention import Segments, segment_attention

CPU = torch.device("cpu")
MODULE = SimpleNamespace()
Spans = tuple[tuple[int, int, int, int], ...]


def spans_of(*groups: tuple[int, tuple[int, ...]]) -> Spans:
    """Each group is a prompt length and the lengths of what follows it; prompt 0: no prefix."""
    spans: list[tuple[int, int, int, int]] = []
    end = 0
    for prompt, lengths in groups:
        first = end
        if prompt:
            spans.append((end, end + prompt, 0, 0))
            end += prompt
        for length in lengths:
            spans.append((end, end + length, first, first + prompt) if prompt
                         else (end, end + length, 0, 0))  # fmt: skip
            end += length
    return tuple(spans)


SHORT = {
    "one": spans_of((0, (5,))),
    "packed": spans_of((0, (3, 1, 4))),
    "shared": spans_of((3, (2, 4)), (2, (1, 1, 3))),
    "mixed": spans_of((4, (2, 3)), (0, (5,))),
}
# Too long for one masked product.
LONG = {
    "packed": spans_of((0, (300, 200, 40))),
    "one": spans_of((0, (600,))),
    "shared": spans_of((70, (180, 90, 1)), (120, (100,))),
    "long-prompt": spans_of((530, (3, 40, 1)), (2, (5,))),
    "long-completion": spans_of((9, (520, 3, 530)), (0, (4,))),
    "long-prompts": spans_of((530, (3,)), (520, (5, 2))),
    "split-group": spans_of((70, (300, 200, 10)), (5, (3,))),
    "distant-prefix": ((0, 600, 0, 0), (600, 605, 0, 0), (605, 610, 0, 600)),
}
ROWS = [pytest.param(spans, id=name) for name, spans in {
    **{f"short-{name}": spans for name, spans in SHORT.items()},
    **{f"long-{name}": spans for name, spans in LONG.items()},
}.items()]  # fmt: skip
WINDOWS = [None, 1, 3, 1000]


def tensors(spans: Spans, *, heads: int = 4, key_heads: int = 2, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    length = spans[-1][1]
    return [
        torch.randn(
            1, n, length, width, generator=generator, dtype=torch.float64, requires_grad=True
        )
        for n in (heads, key_heads, key_heads)
    ]


def seen_by(spans: Spans, token: int, window: int | None) -> list[int]:
    """What a token attends to: its prefix and its segment up to itself, the last of these."""
    start, _, prefix_start, prefix_stop = next(s for s in spans if s[0] <= token < s[1])
    seen = [*range(prefix_start, prefix_stop), *range(start, token + 1)]
    return seen if window is None else seen[-window:]


def naive(inputs: list[Tensor], spans: Spans, scaling: float, window: int | None) -> Tensor:
    query, key, value = (t[0] for t in inputs)
    share = len(query) // len(key)
    hidden = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool)
    for token in range(len(hidden)):
        hidden[token, seen_by(spans, token, window)] = False
    heads = []
    for head in range(len(query)):
        logits = scaling * (query[head] @ key[head // share].T)
        weights = torch.softmax(logits.masked_fill(hidden, -math.inf), dim=-1)
        heads.append(weights @ value[head // share])
    return torch.stack(heads, dim=1)[None]  # [1, T, heads, D]


def attend(inputs: list[Tensor], spans: Spans, **kwargs: Any) -> Tensor:
    out, weights = segment_attention(
        MODULE, *inputs, None, segments=Segments(spans=spans, device=CPU), **kwargs
    )
    assert weights is None
    return out


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("spans", ROWS)
def test_output_and_gradients(spans: Spans, window: int | None) -> None:
    inputs = tensors(spans)
    out = attend(inputs, spans, scaling=0.7, sliding_window=window)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = naive(inputs, spans, 0.7, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for found, wanted in zip(
        torch.autograd.grad((out * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("spans", [SHORT["shared"], LONG["packed"]], ids=["short", "long"])
def test_queries_share_keys_by_head(spans: Spans, key_heads: int) -> None:
    inputs = tensors(spans, key_heads=key_heads)
    out = attend(inputs, spans)
    expected = naive(inputs, spans, 1 / math.sqrt(4), None)  # the scale if none is given
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_kinds_of_attention_that_are_not_offered_are_refused(name: str) -> None:
    spans = SHORT["one"]
    with pytest.raises(ModelError, match=rf"SimpleNamespace.*`{name}`.*learner\.packing: false"):
        attend(tensors(spans), spans, **{name: 30.0})
    attend(tensors(spans), spans, **{name: None})


rows = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=4,
).map(lambda groups: spans_of(*groups))


@given(rows, st.sampled_from(WINDOWS))
def test_any_short_row(spans: Spans, window: int | None) -> None:
    inputs = tensors(spans)
    out = attend(inputs, spans, scaling=0.7, sliding_window=window)
    torch.testing.assert_close(out, naive(inputs, spans, 0.7, window), rtol=0, atol=1e-10)


@given(rows)
@settings(max_examples=50)
def test_variable_length_kernels_see_the_same(spans: Spans) -> None:
    """Causal and aligned to the last query and the last key of each segment, as they do it."""
    index, queries, keys, longest_query, longest_key = Segments(
        spans=spans, device=CPU
    ).variable_length
    assert queries.dtype == keys.dtype == torch.int32
    assert len(queries) == len(keys) == len(spans) + 1
    assert queries[-1] == spans[-1][1]
    assert keys[-1] == len(index)
    assert longest_query == queries.diff().max()
    assert longest_key == keys.diff().max()
    for segment in range(len(spans)):
        of_segment = index[keys[segment] : keys[segment + 1]].tolist()
        last = int(queries[segment + 1]) - 1
        for query in range(int(queries[segment]), last + 1):
            seen = of_segment[: len(of_segment) - (last - query)]
            assert seen == seen_by(spans, query, None)
