"""A generator whose engine can be told to do its part of a weight sync wrongly."""

from __future__ import annotations

import os
import signal
from typing import Any

from tiny_engine import WatchedGenerator

from actors.engine_checks import EngineChecks


class FaultyGenerator(WatchedGenerator):
    """Its faults are methods of `Faults`."""

    _worker_extension = "faulty_engine.Faults"

    async def fault(self, method: str, *arguments: Any) -> None:
        await self._engine.collective_rpc(method, args=arguments)


class Faults(EngineChecks):
    """In the worker process of the engine."""

    _gives_none = False

    def give_no_checksums(self, none: bool) -> None:
        """From now on, as the worker of a back end that has none."""
        self._gives_none = none

    def received_weights(self) -> tuple[dict[str, int], list[str]]:
        return ({}, []) if self._gives_none else super().received_weights()

    def keep_stale_output_layer(self, stale: bool) -> None:
        """From now on do not tell the output layer of new weights."""
        engine = self.weight_transfer_engine
        if stale:
            engine.refresh_output_layers = lambda: None
        else:
            del engine.refresh_output_layers

    def stop_in_next_transfer(self, name: str) -> None:
        """When this tensor of the next update comes, this process gets no further: SIGSTOP."""
        engine = self.weight_transfer_engine
        load = engine.model.load_weights

        def load_some(weights: Any) -> Any:
            del engine.model.load_weights

            def some() -> Any:
                for tensor_name, tensor in weights:
                    if tensor_name == name:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    yield tensor_name, tensor

            return load(some())

        engine.model.load_weights = load_some

    def break_next_transfer(self, name: str) -> None:
        """When this tensor of the next update comes, fail."""
        engine = self.weight_transfer_engine
        load = engine.model.load_weights

        def load_some(weights: Any) -> Any:
            del engine.model.load_weights

            def some() -> Any:
                for tensor_name, tensor in weights:
                    if tensor_name == name:
                        raise ValueError("broken on purpose")
                    yield tensor_name, tensor

            return load(some())

        engine.model.load_weights = load_some
