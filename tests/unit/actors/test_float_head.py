"""Float32 logits of bfloat16 weights in the engine on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from actors import float_head

TOKENS, HIDDEN, VOCABULARY = 8, 64, 512  # enough for the kernels that round factors


@pytest.fixture
def layer() -> Any:
    float_head.register()
    float_head.register()  # every process of an engine may do so again
    with set_current_vllm_config(VllmConfig()):
        found = LogitsProcessor(VOCABULARY)
    found.head_dtype = torch.float32
    return found


def head(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    return SimpleNamespace(weight=weight, tp_size=1)


HIDDEN_STATES = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()


def test_the_engine_builds_it_and_logits_are_not_rounded(layer: Any) -> None:
    assert isinstance(layer, float_head.FloatHead)
    lm_head = head(0)
    logits = layer(lm_head, HIDDEN_STATES)
    assert logits.dtype == torch.float32
    exact = HIDDEN_STATES.double() @ lm_head.weight.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-4)
    bias = torch.linspace(-1, 1, VOCABULARY).bfloat16()
    logits = layer(lm_head, HIDDEN_STATES, bias)
    torch.testing.assert_close(logits.double(), exact + bias.double(), rtol=0, atol=1e-4)


def test_new_weights_count_from_their_update_on(layer: Any) -> None:
    lm_head = head(0)
    layer(lm_head, HIDDEN_STATES)
    lm_head.weight.copy_(head(1).weight)
    layer.weights_changed()
    exact = HIDDEN_STATES.double() @ lm_head.weight.double().T
    logits = layer(lm_head, HIDDEN_STATES)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-4)


def test_other_products_keep_their_precision(layer: Any) -> None:
    settings: Any = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "ieee"
    layer(head(0), HIDDEN_STATES)
    after, settings.fp32_precision = settings.fp32_precision, before
    assert after == "ieee"


@pytest.mark.parametrize(
    ("head_dtype", "hidden", "weight"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_other_dtypes_are_left_to_vllm(
    layer: Any,
    monkeypatch: pytest.MonkeyPatch,
    head_dtype: torch.dtype,
    hidden: torch.dtype,
    weight: torch.dtype,
) -> None:
    of_vllm = torch.full((TOKENS, VOCABULARY), 7.0)
    monkeypatch.setattr(LogitsProcessor, "_apply_head", lambda *_: of_vllm)
    layer.head_dtype = head_dtype
    lm_head = head(0)
    lm_head.weight = lm_head.weight.to(weight)
    assert torch.equal(layer(lm_head, HIDDEN_STATES.to(hidden)), of_vllm)
