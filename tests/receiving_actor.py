"""The Ray actor before a process that receives weights, which imports nothing that takes time."""

from __future__ import annotations

import os
from multiprocessing.connection import Client
from typing import Any


class ReceivingActor:
    """Passes calls on to `receiving_process.Receiver`, and dies when that dies.

    Args:
        address: of the socket that `receiving_process.serve` answers at.
    """

    def __init__(self, address: str) -> None:
        self._connection = Client(address)

    def pid(self) -> int:
        return int(self._ask("pid"))

    def signal_at(self, name: str, signal_number: int) -> None:
        self._ask("signal_at", name, signal_number)

    def num_open(self) -> Any:
        return self._ask("num_open")

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._ask("init_weight_transfer_engine", info)

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._ask("update_weights", info)

    def finish_weight_update(self, version: int) -> None:
        self._ask("finish_weight_update", version)

    def weights(self) -> Any:
        return self._ask("weights")

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            self._connection.send((method, arguments))
            answer = self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if isinstance(answer, Exception):
            raise answer
        return answer
