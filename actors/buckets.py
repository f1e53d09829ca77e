"""Tensors of a weight sync in flat buffers of bounded size, and their checksums."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta

_LEAST_BLOCK = 2**26  # of virtual memory: what no bucket has reached was never written
_ALIGNMENT = 64  # bytes: a view needs a start that its dtype can have, a copy likes a cache line


def num_bytes(meta: ParamMeta) -> int:
    """Of the tensor itself."""
    size: int = meta.dtype.itemsize * math.prod(meta.shape)
    return size


def split(sizes: Sequence[int], bucket_bytes: int) -> list[slice]:
    """Cut a sequence of tensors into buckets, in order.

    Args:
        sizes: of the tensors, bytes.
        bucket_bytes: of a bucket, padding included. A larger tensor is a bucket of its own:
            whoever gathers or loads it needs all of it at once.

    Example: ``split([4, 4, 999], 128) == [slice(0, 2), slice(2, 3)]``
    """
    buckets: list[slice] = []
    start = filled = 0
    for index, size in enumerate(map(_padded, sizes)):
        if filled and filled + size > bucket_bytes:
            buckets.append(slice(start, index))
            start, filled = index, 0
        filled += size
    if filled or start < len(sizes):
        buckets.append(slice(start, len(sizes)))
    return buckets


def total_bytes(bucket: Sequence[ParamMeta]) -> int:
    """Of a bucket with these tensors."""
    return sum(_padded(num_bytes(meta)) for meta in bucket)


def views(buffer: Tensor, bucket: Sequence[ParamMeta]) -> Iterator[Tensor]:
    """The tensors of a bucket inside of its buffer: uint8 [total_bytes]."""
    start = 0
    for meta in bucket:
        size = num_bytes(meta)
        yield buffer[start : start + size].view(meta.dtype).view(meta.shape)
        start += _padded(size)


def checksum(tensor: Tensor) -> int:
    """64 bits that follow from the bytes of a contiguous tensor in host memory, in their order."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy().data)


class Buffers:
    """Memory for buckets, which is used again once no tensor refers to it.

    New memory costs its first write: a copy into it is five times as slow as into used memory.

    Args:
        bucket_bytes: of most buckets.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._block_bytes = max(bucket_bytes, _LEAST_BLOCK)
        self._free: list[Any] = []

    def take(self, size: int) -> Tensor:
        """A buffer of ``size`` bytes, not initialised: uint8 [size]."""
        if size > self._block_bytes:
            return torch.empty(size, dtype=torch.uint8)
        memory = self._free.pop() if self._free else np.empty(self._block_bytes, dtype=np.uint8)
        lent = memory[:size]
        # The storage of the tensor and of all views of it keeps `lent` alive, not `memory`.
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
