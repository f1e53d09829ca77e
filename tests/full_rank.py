"""A learner rank that sends one of several models in full, without DeepSpeed and an optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from actors.full_sync import FullSender
from actors.node import LOOPBACK, free_port
from actors.protocol import SyncRendezvous
from actors.sync import GeneratorClient
from real_ray.weights import SentWeights


class FullRank:
    """A learner rank whose version v has the weights of ``models[v % len(models)]``."""

    def __init__(self, models: Sequence[str]) -> None:
        torch.set_num_threads(1)
        loaded = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in models]
        self._states = [model.state_dict() for model in loaded]
        self._model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
        self._sender: FullSender | None = None

    def connect(self, _: SyncRendezvous | None, generators: Mapping[str, Any]) -> None:
        """As `LearnerActor.connect`, with a rendezvous of its own."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._client = GeneratorClient(generators, workers_per_generator=1, timeout_s=60.0)
        self._sender = FullSender(
            self._model,
            client=self._client,
            dtype=torch.float32,
            rendezvous=SyncRendezvous(
                backend="gloo",
                master_address=LOOPBACK,
                master_port=free_port(LOOPBACK),
                num_generators=len(generators),
                workers_per_generator=1,
                timeout_s=60.0,
                bucket_bytes=2**26,
            ),
            rank=0,
        )

    def change(self, name: str, shape: Sequence[int] | None) -> None:
        """Let a parameter be none any more, or one of another shape."""
        module, _, parameter = name.rpartition(".")
        value = None if shape is None else nn.Parameter(torch.zeros(*shape))
        self._model.get_submodule(module).register_parameter(parameter, value)

    def send_weights(self, policy_version: int) -> SentWeights:
        assert self._sender is not None
        own = self._model.state_dict()
        state = self._states[policy_version % len(self._states)]
        fits = {n: t for n, t in state.items() if n in own and own[n].shape == t.shape}
        self._model.load_state_dict(fits, strict=False)
        self._client.policy_version = policy_version
        return self._sender.send_weights()
