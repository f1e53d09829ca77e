"""Tensors in flat buckets of bounded size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta

from actors.buckets import Buffers, checksum, num_bytes, split, total_bytes, views

BUCKET = 4096


@given(st.lists(st.integers(0, 3 * BUCKET), max_size=40))
def test_buckets_are_in_order_and_bounded(sizes: list[int]) -> None:
    parts = split(sizes, BUCKET)
    assert [size for part in parts for size in sizes[part]] == sizes
    assert all(sizes[part] for part in parts)
    for part in parts:
        bucket = [ParamMeta("x", torch.uint8, (size,)) for size in sizes[part]]
        assert total_bytes(bucket) <= BUCKET or len(bucket) == 1 or sum(sizes[part]) > BUCKET
        big = [meta for meta in bucket if num_bytes(meta) > BUCKET]
        assert not big or [meta for meta in bucket if num_bytes(meta)] == big


def test_no_bucket_could_take_the_first_tensor_of_the_next() -> None:
    assert split([64] * 7, 192) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert split([4, 4, 999], 128) == [slice(0, 2), slice(2, 3)]
    assert split([], 128) == []


def test_views_hold_what_was_put_into_them() -> None:
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "bf16": torch.randn(5, 3).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "counts": torch.arange(7),
    }
    bucket = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    buffer = torch.empty(total_bytes(bucket), dtype=torch.uint8)
    for place, tensor in zip(views(buffer, bucket), tensors.values(), strict=True):
        place.copy_(tensor)
    for found, tensor in zip(views(buffer, bucket), tensors.values(), strict=True):
        assert found.dtype == tensor.dtype
        torch.testing.assert_close(found, tensor, rtol=0, atol=0)


def test_checksums_see_a_bit_and_an_exchange() -> None:
    tensor = torch.randn(4, 3)
    flipped, exchanged = tensor.clone(), tensor.flip(0).contiguous()
    flipped.view(torch.int32)[2, 1] ^= 1
    sums = {checksum(t) for t in (tensor, flipped, exchanged, torch.tensor(1.5), torch.empty(0))}
    assert len(sums) == 5
    assert checksum(tensor) == checksum(tensor.clone())


def test_memory_is_used_again_only_when_no_view_refers_to_it() -> None:
    buffers = Buffers(BUCKET)
    first = buffers.take(100)
    part: Tensor | None = first[:8].view(torch.float64)
    address = first.data_ptr()
    del first
    assert buffers.take(BUCKET).data_ptr() != address
    part = None
    assert part is None
    assert address in {buffers.take(10).data_ptr(), buffers.take(10).data_ptr()}
    assert len(buffers.take(3 * BUCKET)) == 3 * BUCKET
