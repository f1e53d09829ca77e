"""The learner's weights as vLLM's weight transfer wants them: full tensors, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource


class DeepSpeedWeightSource(WeightSource):
    """Parameters of a DeepSpeed engine at any ZeRO stage, under their Hugging Face names.

    Tied parameters are listed once, as in a checkpoint.
    """

    def __init__(self, engine: Any, dtype: torch.dtype) -> None:
        self._engine = engine
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        # Under ZeRO-3 a partitioned parameter has shape (0,); its true one is in ds_shape.
        return [
            ParamMeta(name, self._dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
            for name, parameter in self._engine.module.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return full_parameters(self._engine, self._dtype)


def full_parameters(engine: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full value of each parameter. Under ZeRO-3 all ranks iterate together."""
    import deepspeed

    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_shape")):
            value = parameter.detach().to(dtype, copy=True)
        yield name, value
