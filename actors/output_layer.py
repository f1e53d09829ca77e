"""The output layer of a vLLM model after its weights were reloaded: made fresh, and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from actors.float_head import FloatHead

_NUM_COLUMNS = 8


def refresh_output_layers(model: nn.Module) -> None:
    """Let output layers drop the copies that they have made of older weights.

    vLLM repacks a copy of the output layer's weight for the CPU. Where it is tied to the
    embedding nothing is loaded under its own name, so vLLM does not know that the copy is stale.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(layer, FloatHead):
            layer.weights_changed()


class OutputLayerCheck:
    """Whether logits follow from the weight that was received for the output layer.

    Some columns of the received weight [vocabulary, hidden] are compared with what the layer, as
    it runs, makes of unit vectors: exact in any dtype, since all other products are zero.

    Args:
        name: of the tensor whose values the layer has, the embedding's if tied; empty: no check.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._columns = torch.empty(0, dtype=torch.long)
        self._expected: Tensor | None = None

    def note(self, name: str, tensor: Tensor) -> None:
        """To be told of each tensor that is received."""
        if self._name and name == self._name:
            hidden = tensor.shape[1]
            self._columns = torch.linspace(0, hidden - 1, min(hidden, _NUM_COLUMNS)).long()
            self._expected = tensor[:, self._columns].clone()

    @torch.no_grad()
    def problems(self, model: nn.Module) -> list[str]:
        """Output layers of a reloaded model that have other weights; names in a message each."""
        if not self._name:
            return []
        if self._expected is None:
            return [f"not received: {self._name}, the weight of the output layer"]
        heads = {
            id(module): (name, module)
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, ParallelLMHead) or name.rpartition(".")[2] == "lm_head"
        }
        processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
        return [
            f"the output layer {name} does not have the weights received as {self._name}"
            for name, head in heads.values()
            for processor in processors
            if not self._is_right(head, processor)
        ]

    def _is_right(self, head: Any, processor: Any) -> bool:
        assert self._expected is not None
        weight = head.weight
        units = torch.zeros(
            len(self._columns), weight.shape[1], dtype=weight.dtype, device=weight.device
        )
        units[torch.arange(len(self._columns)), self._columns] = 1
        logits = processor._apply_head(head, units, None)
        # Under tensor parallelism each worker has a part of the vocabulary, and then padding.
        first = head.shard_indices.org_vocab_start_index
        end = min(head.shard_indices.org_vocab_end_index, len(self._expected))
        expected = self._expected[first:end].to(logits.device, weight.dtype)
        return torch.equal(logits[:, : end - first].T.to(weight.dtype), expected)
