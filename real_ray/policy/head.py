"""The output layer in float32."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def use_float32_head(model: Any) -> None:
    """Let a Hugging Face causal language model compute its logits in float32.

    Logits of 16 and more are rounded to steps of 0.125 in bfloat16, which is as much as the scores
    of REAL differ. The generators do the same (vLLM's `head_dtype`); the weight keeps its dtype.
    """
    head = model.get_output_embeddings()
    head.forward = MethodType(_forward, head)  # a copy of the model has its own


def _forward(head: Any, hidden: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias.float()
    return F.linear(hidden.float(), head.weight.float(), bias)
