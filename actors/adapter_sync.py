"""Weight sync of a LoRA adapter alone: a few MB instead of the whole model."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from actors.buckets import checksum, split
from actors.protocol import AdapterUpdate
from actors.sync import GeneratorClient
from actors.weight_source import BUCKET_BYTES, full_shape, gathered
from real_ray.policy.lora import adapter_files, adapter_parameters
from real_ray.weights import SentWeights


class AdapterSender:
    """Sends the adapter of a model to all generators, beside their unchanged base weights.

    The tensors travel through Ray's object store as the files of a peft adapter directory, once
    for all generators of a node; no weight-transfer group is needed.

    Args:
        model: the Hugging Face model inside the DeepSpeed engine, after `add_lora`.
        client: holds the generators, and the label of the next update.
        dtype: of the tensors sent.
        is_sender: true on one rank; the others only take part in gathering under ZeRO-3.
    """

    def __init__(
        self, model: nn.Module, *, client: GeneratorClient, dtype: torch.dtype, is_sender: bool
    ) -> None:
        self._model = model
        self._client = client
        self._dtype = dtype
        self._is_sender = is_sender
        parameters = adapter_parameters(model).values()
        assert parameters, "add_lora comes first"
        self.num_tensors = len(parameters)
        self.num_bytes = dtype.itemsize * sum(math.prod(full_shape(p)) for p in parameters)

    def send_weights(self) -> SentWeights:
        """Send the adapter, labelled ``client.policy_version``; all ranks together.

        Raises:
            SyncError: a generator failed or did not answer in time.
        """
        began = time.monotonic()
        tensors: dict[str, torch.Tensor] = {}
        parameters = list(adapter_parameters(self._model).items())
        sizes = [self._dtype.itemsize * math.prod(full_shape(p)) for _, p in parameters]
        for part in split(sizes, BUCKET_BYTES):  # each gathering waits for all ranks
            with gathered([parameter for _, parameter in parameters[part]]):
                if self._is_sender:
                    for name, parameter in parameters[part]:
                        tensors[name] = parameter.detach().to("cpu", self._dtype, copy=True)
        gather = time.monotonic() - began
        if self._is_sender:
            self._client.load_adapter(
                AdapterUpdate(
                    policy_version=self._client.policy_version,
                    num_tensors=len(tensors),
                    files=adapter_files(self._model, tensors),
                )
            )
        return SentWeights(
            policy_version=self._client.policy_version,
            num_tensors=self.num_tensors,
            num_bytes=self.num_bytes,
            checksums={name: checksum(tensor.contiguous()) for name, tensor in tensors.items()},
            seconds={"gather": gather, "load": time.monotonic() - began - gather},
        )

    def close(self) -> None:
        """Nothing is held between two syncs."""
