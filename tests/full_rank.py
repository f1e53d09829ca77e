"""A learner rank that sends one of several models in full, without DeepSpeed and an optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.full_sync import FullSender
from actors.node import LOOPBACK, free_port
from actors.protocol import SentWeights, SyncRendezvous
from actors.sync import GeneratorClient


class FullRank:
    """A learner rank whose version v has the weights of ``models[v % len(models)]``."""

    def __init__(self, models: Sequence[str], generator: Any) -> None:
        torch.set_num_threads(1)
        loaded = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in models]
        self._states = [model.state_dict() for model in loaded]
        self._model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
        self._client = GeneratorClient([generator], workers_per_generator=1, timeout_s=60.0)
        self._sender = FullSender(
            self._model,
            client=self._client,
            dtype=torch.float32,
            rendezvous=SyncRendezvous(
                backend="gloo",
                master_address=LOOPBACK,
                master_port=free_port(LOOPBACK),
                num_generators=1,
                workers_per_generator=1,
                timeout_s=60.0,
            ),
            rank=0,
        )

    def send_weights(self, policy_version: int) -> SentWeights:
        self._model.load_state_dict(self._states[policy_version % len(self._states)])
        self._client.policy_version = policy_version
        self._sender.send_weights()
        return SentWeights(num_tensors=self._sender.num_tensors, num_bytes=self._sender.num_bytes)
