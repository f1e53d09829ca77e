"""A process that receives weights into nothing, for `ReceivingActor`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Receiver:
    """What a generator is to the sending side of a weight sync, without an engine."""

    def __init__(self) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig

        from actors.gloo_receiver import GlooWeightTransferEngine

        self._model = _Model()
        self._engine: Any = GlooWeightTransferEngine(
            WeightTransferConfig(backend="gloo"),
            SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
                model_config=None,
            ),
            torch.device("cpu"),
            self._model,
        )
        self._version = 0

    def pid(self) -> int:
        return os.getpid()

    def signal_at(self, name: str, signal_number: int) -> None:
        """When this tensor of the next update comes, send this process a signal."""
        number = signal.Signals(signal_number)
        self._model.fault = (name, lambda: os.kill(os.getpid(), number))

    def fail_at(self, name: str) -> None:
        """Refuse this tensor of the next update."""

        def refuse() -> None:
            raise ValueError("refused on purpose")

        self._model.fault = (name, refuse)

    def num_open(self) -> tuple[int, int]:
        """File descriptors and threads of Python."""
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._engine.shutdown()
        self._engine.init_transfer_engine(self._engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self._engine.update_weights(info)

    def finish_weight_update(self, version: int) -> None:
        self._engine.finish_weight_update()
        self._version = version

    def weights(self) -> tuple[int, dict[str, int], list[str]]:
        return self._version, self._engine.checksums, self._engine.problems


class OwnReceiver(Receiver):
    """vLLM's weight-sync client for a receiver in the process of the sender.

    Args:
        fails_at: name of a tensor that is refused, or "start", or empty.
    """

    policy_version = 1
    error = None

    def __init__(self, fails_at: str) -> None:
        super().__init__()
        self.fail_at(fails_at)

    def reset(self) -> None:
        pass

    def start_weight_update(self) -> None:
        super().start_weight_update()
        if self._model.fault[0] == "start":
            self._model.fault[1]()

    def finish_weight_update(self, version: int = 1) -> None:
        super().finish_weight_update(version)


class _Model(nn.Module):
    fault: tuple[str, Any] = ("", None)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        names = set()
        for name, _ in weights:
            if name == self.fault[0]:
                happen, self.fault = self.fault[1], ("", None)
                happen()
            names.add(name)
        return names


def serve(listener: socket) -> None:
    """Answer calls of `Receiver`'s methods, of one caller, until it is gone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    receiver = Receiver()
    with listener:
        caller, _ = listener.accept()
    with Connection(caller.detach()) as connection:
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            try:
                answer = getattr(receiver, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                answer = error
            connection.send(answer)
