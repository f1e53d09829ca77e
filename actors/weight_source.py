"""The learner's weights as vLLM's weight transfer wants them: full tensors, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from real_ray.policy.lora import lora_weights


class DeepSpeedWeightSource(WeightSource):
    """Parameters of a model at any ZeRO stage, under their Hugging Face names.

    Tied parameters are listed once, as in a checkpoint. With LoRA each adapted weight is
    ``W + alpha / rank * B A``. It is computed in float32, but sent in ``dtype``: bfloat16 has 8
    significant bits, so a part of the update that is below 1/256 of the weight itself is rounded
    away, which sending the adapter alone (`AdapterSender`) does not do.

    Args:
        model: the Hugging Face model inside the DeepSpeed engine.
        dtype: of the tensors sent.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(weight.name, self._dtype, full_shape(weight.base))
            for weight in lora_weights(self._model)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return full_parameters(self._model, self._dtype)


def full_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full value of each parameter; adapters of LoRA are merged into what they adapt.

    Under ZeRO-3 all ranks iterate together. One parameter is gathered at a time.
    """
    for weight in lora_weights(model):
        with gathered(weight.parameters):
            value = weight.merged(dtype)
        yield weight.name, value


def gathered(parameters: list[nn.Parameter]) -> Any:
    """Context in which parameters have their full values; all ranks together under ZeRO-3."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(
        parameters, enabled=any(hasattr(parameter, "ds_shape") for parameter in parameters)
    )


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Under ZeRO-3 a partitioned parameter has shape (0,); its true one is in ds_shape."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
