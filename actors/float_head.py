"""Float32 logits of a bfloat16 model on a CPU: takes the place of a layer of vLLM.

On a GPU bfloat16 factors give float32 logits directly. On a CPU vLLM converts the weights of the
output layer to float32 in each step anew, which takes longer than all other layers together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from real_ray.policy.products import bfloat16_factors


def register() -> None:
    """Let vLLM build `FloatHead` instead of its own layer; may be called repeatedly."""
    if current_platform.is_cpu() and LogitsProcessor.__name__ not in op_registry_oot:
        LogitsProcessor.register_oot(FloatHead, name=LogitsProcessor.__name__)


class FloatHead(LogitsProcessor):
    """Keeps the weights of the output layer in float32 until `weights_changed`."""

    _float_weight: Tensor | None = None

    def weights_changed(self) -> None:
        """To be called after each weight update."""
        self._float_weight = None

    def _apply_head(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None
    ) -> Tensor:
        if not (
            self.head_dtype == torch.float32
            and hidden_states.dtype == lm_head.weight.dtype == torch.bfloat16
        ):
            logits: Tensor = super()._apply_head(lm_head, hidden_states, embedding_bias)
            return logits
        if self._float_weight is None:
            self._float_weight = lm_head.weight.float()
        bias = None if embedding_bias is None else embedding_bias.float()
        with bfloat16_factors():
            return functional.linear(hidden_states.float(), self._float_weight, bias)
