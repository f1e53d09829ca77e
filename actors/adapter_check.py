"""What vLLM does not tell about a LoRA adapter that it has loaded."""

from __future__ import annotations

from typing import Any


class AdapterCheck:
    """Added by vLLM to its worker class (`worker_extension_cls`): methods for `collective_rpc`."""

    model_runner: Any  # of the worker

    def unused_adapter_layers(self, adapter_id: int) -> list[str]:
        """Layers of a loaded adapter that adapt nothing; vLLM itself skips them in silence."""
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.get_adapter(adapter_id).loras) - set(manager.modules))
