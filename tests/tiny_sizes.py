"""Sizes of random models that take milliseconds, for configs of Llama's kind."""

from __future__ import annotations

from typing import Any

VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
