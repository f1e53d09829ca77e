"""Matrix products of bfloat16 numbers with a float32 result, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Context in which float32 matrix products on the CPU may round their factors to bfloat16.

    Sums stay in float32, so products of bfloat16 numbers are as exact as without. torch then takes
    oneDNN, which multiplies bfloat16 where the CPU has matrix units for it (AMX). Elsewhere its
    float32 is still up to three times as fast as the default with few rows. torch has no product of
    bfloat16 tensors with a float32 result on CPUs.
    """
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
