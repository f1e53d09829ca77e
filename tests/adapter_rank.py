"""A learner rank that has a LoRA adapter and sends it, without an optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.adapter_sync import AdapterSender
from actors.protocol import AdapterUpdate, SyncRendezvous
from actors.sync import GeneratorClient
from actors.weight_source import DeepSpeedWeightSource
from real_ray.policy.lora import adapter_files, adapter_parameters, add_lora, without_lora
from real_ray.weights import SentWeights

BASE = 0  # the version without adapter


class AdapterRank:
    """A learner rank whose adapter is random and follows from the version alone."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        add_lora(self._model, rank=6, alpha=9.0, target_modules=["all-linear"], seed=0)
        self._silent = False

    def connect(self, _: SyncRendezvous | None, generators: Mapping[str, Any]) -> None:
        """As `LearnerActor.connect`."""
        self._client = GeneratorClient(generators, workers_per_generator=1, timeout_s=60.0)
        self._sender = AdapterSender(
            self._model, client=self._client, dtype=torch.float32, is_sender=True
        )

    def become(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in adapter_parameters(self._model).values():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def fall_silent(self, silent: bool) -> None:
        """From now on say that weights were sent, and send none."""
        self._silent = silent

    def send_weights(self, policy_version: int) -> SentWeights:
        self._client.policy_version = policy_version
        if not self._silent:
            return self._sender.send_weights()
        return SentWeights(
            policy_version=policy_version,
            num_tensors=self._sender.num_tensors,
            num_bytes=self._sender.num_bytes,
        )

    def misplaced_adapter(self) -> AdapterUpdate:
        """An adapter whose second layer is for an eighth one, which the model does not have."""
        tensors = {
            name.replace(".layers.1.", ".layers.7."): parameter.detach()
            for name, parameter in adapter_parameters(self._model).items()
        }
        return AdapterUpdate(
            policy_version=self._client.policy_version,
            num_tensors=len(tensors),
            files=adapter_files(self._model, tensors),
        )

    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        ids = torch.from_numpy(token_ids).long()
        with torch.no_grad():
            logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprobs = (logits / temperature).log_softmax(-1)
        return logprobs.gather(1, ids[1:, None])[:, 0].numpy()

    def logprobs(self, version: int, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        self.become(version)
        with without_lora(self._model) if version == BASE else nullcontext():
            return self.probe(token_ids, temperature)

    def weight_source(self) -> tuple[list[Any], list[Any]]:
        """Declared and yielded name, dtype and shape of all full weights."""
        source = DeepSpeedWeightSource(self._model, torch.bfloat16)
        declared = [(meta.name, str(meta.dtype), tuple(meta.shape)) for meta in source.metadata()]
        return declared, [(name, str(t.dtype), tuple(t.shape)) for name, t in source]
