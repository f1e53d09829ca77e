"""The learner's weights as vLLM's weight transfer wants them: full tensors, one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.m2n_common import REPLICATED, M2NMesh, M2NParamMeta
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from actors.buckets import split
from real_ray.policy.lora import LoraWeight, lora_weights

BUCKET_BYTES = 2**26


class DeepSpeedWeightSource(WeightSource):
    """Parameters of a model at any ZeRO stage, under their Hugging Face names.

    Tied parameters are listed once, as in a checkpoint. With LoRA each adapted weight is
    ``W + alpha / rank * B A``. It is computed in float32, but sent in ``dtype``: bfloat16 has 8
    significant bits, so a part of the update that is below 1/256 of the weight itself is rounded
    away, which sending the adapter alone (`AdapterSender`) does not do.

    Args:
        model: the Hugging Face model inside the DeepSpeed engine.
        dtype: of the tensors sent.
        bucket_bytes: of the parameters that are gathered at a time.
        copies: yield copies; false: a tensor may be the parameter itself, and is valid only until
            the next one is asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        copies: bool = True,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._copies = copies
        self._begun: Iterator[tuple[str, torch.Tensor]] | None = None

    @contextmanager
    def gathering_to_the_end(self) -> Iterator[None]:
        """Gather all that the block has not, also if it fails: once for each sync on each rank.

        Under ZeRO-3 the other ranks gather all, whatever happens to the one that sends; without
        it they would wait until the process group gives up.
        """
        self._begun = None
        try:
            yield
        finally:
            for _ in iter(self) if self._begun is None else self._begun:
                pass
            self._begun = None

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(weight.name, self._dtype, full_shape(weight.base))
            for weight in lora_weights(self._model)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._begun = full_parameters(
            self._model, self._dtype, bucket_bytes=self._bucket_bytes, copies=self._copies
        )
        return self._begun


class ReplicatedWeightSource(DeepSpeedWeightSource, M2NWeightSource):
    """The same for `nccl_m2n`: gathered on all learner ranks, each of which sends.

    DeepSpeed cuts parameters without regard to their rows, which that back end cannot express.

    Args:
        num_ranks: of the learner.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, bucket_bytes: int, num_ranks: int
    ) -> None:
        super().__init__(model, dtype, bucket_bytes=bucket_bytes)
        self._num_ranks = num_ranks

    def mesh(self) -> M2NMesh:
        return M2NMesh((self._num_ranks, 1), 0)

    def metadata(self) -> list[ParamMeta]:
        return [
            M2NParamMeta(meta.name, meta.dtype, meta.shape, REPLICATED)
            for meta in super().metadata()
        ]


def full_parameters(
    model: nn.Module, dtype: torch.dtype, *, bucket_bytes: int = BUCKET_BYTES, copies: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full value of each parameter; adapters of LoRA are merged into what they adapt.

    Under ZeRO-3 all ranks iterate together. Parameters are gathered by buckets.

    Args:
        bucket_bytes: of a bucket, in ``dtype``; a larger parameter is a bucket of its own.
        copies: false: a value is valid only until the next one is asked for.
    """
    weights = list(lora_weights(model))
    sizes = [dtype.itemsize * math.prod(full_shape(weight.base)) for weight in weights]
    for part in split(sizes, bucket_bytes):
        bucket = weights[part]
        with gathered([parameter for weight in bucket for parameter in weight.parameters]):
            for weight in bucket:
                yield weight.name, _value(weight, dtype, copies=copies)


def output_layer_name(model: Any) -> str:
    """Name, in a checkpoint, of the parameter that the output layer has: the embedding's if tied.

    Empty if the model does not tell.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        return ""
    return next((w.name for w in lora_weights(model) if w.base is layer.weight), "")


def gathered(parameters: list[nn.Parameter]) -> Any:
    """Context in which parameters have their full values; all ranks together under ZeRO-3."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(
        parameters, enabled=any(hasattr(parameter, "ds_shape") for parameter in parameters)
    )


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Under ZeRO-3 a partitioned parameter has shape (0,); its true one is in ds_shape."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _value(weight: LoraWeight, dtype: torch.dtype, *, copies: bool) -> torch.Tensor:
    if copies or weight.factors is not None:
        return weight.merged(dtype)
    return weight.base.detach().to(dtype)
