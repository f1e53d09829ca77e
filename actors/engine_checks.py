"""What vLLM does not tell about the weights of an engine, and does not do for them."""

from __future__ import annotations

from typing import Any


class EngineChecks:
    """Added by vLLM to its worker class (`worker_extension_cls`): methods for `collective_rpc`."""

    # Of the worker.
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def unused_adapter_layers(self, adapter_id: int) -> list[str]:
        """Layers of a loaded adapter that adapt nothing; vLLM itself skips them in silence."""
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.get_adapter(adapter_id).loras) - set(manager.modules))

    def abandon_weight_update(self) -> None:
        """End an update that was interrupted, so that the engine can run or be updated anew."""
        from actors.output_layer import refresh_output_layers
        from actors.reload import abandon_reload

        engine = self.weight_transfer_engine
        self._weight_update_active = False
        if abandon_reload(engine.model, engine.model_config):
            refresh_output_layers(engine.model)
        engine.reset_weight_update_target()

    def received_weights(self) -> tuple[dict[str, int], list[str]]:
        """Checksums by tensor, and problems, of the last update; empty: nothing is known."""
        from actors.gloo_receiver import GlooWeightTransferEngine

        engine = self.weight_transfer_engine
        if not isinstance(engine, GlooWeightTransferEngine):
            return {}, []
        return engine.checksums, engine.problems

    def update_seconds(self) -> dict[str, float]:
        """What the parts of the last update took; empty: nothing is known."""
        return dict(getattr(self.weight_transfer_engine, "seconds", {}))
