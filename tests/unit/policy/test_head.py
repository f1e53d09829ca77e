"""The float32 head on bfloat16 models: against float64, with gradients, as models call it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from real_ray.policy import use_float32_head

VOCAB, HIDDEN = 37, 32
ROWS, COLUMNS = 2, 7


def make_model(name: str) -> Any:
    """A model of bfloat16 weights whose logits are of the size that a trained model has."""
    torch.manual_seed(0)
    if name == "bias":
        config = GPTJConfig(
            vocab_size=VOCAB, n_embd=HIDDEN, n_layer=1, n_head=4, rotary_dim=4, n_positions=64
        )
        model: Any = GPTJForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.bias, std=5.0)
    else:
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": name == "tied",
        }
        model = (
            Qwen3ForCausalLM(Qwen3Config(**sizes))
            if name == "tied"
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=3.0)
    return model.to(torch.bfloat16).eval()


@pytest.fixture(params=["tied", "untied", "bias"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(VOCAB, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))


def exact_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits in float64 of the same hidden states and the same weights."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.dtype is torch.bfloat16
    head = model.get_output_embeddings()
    logits = hidden.double() @ head.weight.double().T
    return logits if head.bias is None else logits + head.bias.double()


@torch.no_grad()
def test_logits_are_exact_to_float32(model: Any, ids: Tensor) -> None:
    exact = exact_logits(model, ids)
    assert exact.abs().max() > 16, "where bfloat16 has steps of 0.125"
    coarse = model(input_ids=ids, use_cache=False).logits
    use_float32_head(model)
    logits = model(input_ids=ids, use_cache=False).logits
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
    assert (coarse.double() - exact).abs().max() > 0.02, "without it they are not"


@torch.no_grad()
def test_logits_to_keep_is_honoured(model: Any, ids: Tensor) -> None:
    use_float32_head(model)
    everything = model(input_ids=ids, use_cache=False).logits
    kept = model(input_ids=ids, use_cache=False, logits_to_keep=3).logits
    assert kept.shape == (ROWS, 3, VOCAB)
    torch.testing.assert_close(kept, everything[:, -3:])


def test_the_gradient_is_that_of_the_weight(model: Any, ids: Tensor) -> None:
    """Through hidden states and weight, both of them where the embedding is tied."""
    weight = model.get_output_embeddings().weight
    towards = torch.randn(ROWS, COLUMNS, VOCAB, generator=torch.Generator().manual_seed(2))

    (exact_logits(model, ids) * towards).sum().backward()
    expected = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    use_float32_head(model)
    (model(input_ids=ids, use_cache=False).logits * towards).sum().backward()

    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.abs().sum() > 0
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(expected)
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            parameter.grad.float(), expected[name], rtol=0.02, atol=0.02 * scale, msg=name
        )


@torch.no_grad()
def test_weights_keep_their_dtype_names_and_ties(model: Any) -> None:
    before = {name: (p.dtype, p.shape) for name, p in model.named_parameters()}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    use_float32_head(model)
    assert {name: (p.dtype, p.shape) for name, p in model.named_parameters()} == before
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


@torch.no_grad()
def test_weights_are_read_when_they_are_used(model: Any, ids: Tensor) -> None:
    use_float32_head(model)
    model(input_ids=ids, use_cache=False)
    model.get_output_embeddings().weight.mul_(0.5)
    torch.testing.assert_close(
        model(input_ids=ids, use_cache=False).logits.double(),
        exact_logits(model, ids),
        rtol=1e-5,
        atol=1e-4,
    )


@torch.no_grad()
def test_a_copy_of_the_model_uses_its_own_weights(model: Any, ids: Tensor) -> None:
    use_float32_head(model)
    before = model(input_ids=ids, use_cache=False).logits
    reference = copy.deepcopy(model)
    model.get_output_embeddings().weight.zero_()
    torch.testing.assert_close(reference(input_ids=ids, use_cache=False).logits, before)
