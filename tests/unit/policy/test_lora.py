"""LoRA on small random models: adapters, merged weights, the base model inside, files, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tiny_sizes import SIZES
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from real_ray.errors import ModelError
from real_ray.policy.lora import (
    adapter_files,
    adapter_parameters,
    add_lora,
    has_lora,
    is_adapter,
    lora_weights,
    without_lora,
)

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def make_model(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
        if name == "qwen3"
        else LlamaForCausalLM(
            LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
        )
    )
    return model.to(dtype)


@torch.no_grad()
def randomise(model: Any) -> None:
    """An adapter that has been trained: B is not 0."""
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(model).values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def adapted(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    model = make_model(name, dtype)
    add_lora(model, rank=4, alpha=6.0, target_modules=["all-linear"], seed=0)
    randomise(model)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(2))


def logits(model: Any, ids: Tensor) -> Tensor:
    result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_a_trained_one_does(name: str, ids: Tensor) -> None:
    model = make_model(name)
    before = logits(model, ids)
    assert not has_lora(model)
    add_lora(model, rank=4, alpha=8.0, target_modules=["all-linear"], seed=0)
    assert has_lora(model)
    assert torch.equal(logits(model, ids), before)
    randomise(model)
    assert (logits(model, ids) - before).abs().max() > 0.1


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_all_linear_layers_but_the_output_layer_are_adapted_and_only_adapters_train(
    name: str,
) -> None:
    model = make_model(name)
    add_lora(model, rank=4, alpha=8.0, target_modules=["all-linear"], seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert {name.split(".")[-4] for name in trained} == LINEAR
    assert len(trained) == 2 * 7 * SIZES["num_hidden_layers"]


def test_targets_are_found_by_the_end_of_their_names() -> None:
    model = make_model()
    add_lora(model, rank=2, alpha=4.0, target_modules=["q_proj", "layers.1.mlp.down_proj"], seed=0)
    layers = {name.split(".lora_")[0] for name, _ in model.named_parameters() if is_adapter(name)}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_have_the_dtype_of_the_model_and_follow_the_seed_alone(
    dtype: torch.dtype,
) -> None:
    def factors(seed: int) -> dict[str, Tensor]:
        model = make_model(dtype=dtype)
        add_lora(model, rank=4, alpha=8.0, target_modules=["q_proj"], seed=seed)
        return {name: p.detach() for name, p in adapter_parameters(model).items()}

    first = factors(0)
    again, other = factors(0), factors(1)
    assert {tensor.dtype for tensor in first.values()} == {dtype}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_random_state_of_others_is_left_alone() -> None:
    model = make_model()
    before = torch.get_rng_state()
    add_lora(model, rank=4, alpha=8.0, target_modules=["q_proj"], seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@torch.no_grad()
def test_merged_weights_give_the_model_of_base_and_adapter(name: str, ids: Tensor) -> None:
    model = adapted(name)
    plain = make_model(name)
    merged = {weight.name: weight.merged(torch.float32) for weight in lora_weights(model)}
    assert [n for n, _ in plain.named_parameters()] == list(merged)
    plain.load_state_dict(merged, strict=False)
    assert (logits(plain, ids) - logits(model, ids)).abs().max() < 1e-5


@torch.no_grad()
def test_bfloat16_weights_are_merged_in_float32_and_rounded_once() -> None:
    model = adapted(dtype=torch.bfloat16)
    weight = next(w for w in lora_weights(model) if w.name.endswith("q_proj.weight"))
    assert weight.factors is not None
    a, b = (factor.double() for factor in weight.factors)
    exact = weight.base.double() + 6.0 / 4 * (b @ a)
    merged = weight.merged(torch.bfloat16)
    assert merged.dtype is torch.bfloat16
    # Half a step of bfloat16, which has 8 bits, and what float32 adds.
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert (weight.merged(torch.float32).double() - exact).abs().max() < 1e-6


@torch.no_grad()
def test_weights_are_copies() -> None:
    model = adapted()
    for weight in lora_weights(model):
        weight.merged(torch.float32).zero_()
        assert weight.base.abs().max() > 0 or weight.base.ndim == 1


def test_without_lora_is_the_base_model_and_leaves_training_as_it_was(ids: Tensor) -> None:
    model = adapted()
    base = logits(make_model(), ids)
    with torch.no_grad():
        expected_logits = logits(model, ids)
    expected = torch.autograd.grad(
        logits(model, ids).logsumexp(-1).sum(), list(adapter_parameters(model).values())
    )
    flags = {name: p.requires_grad for name, p in model.named_parameters()}

    loss = logits(model, ids).logsumexp(-1).sum()
    with without_lora(model), torch.no_grad():
        assert torch.equal(logits(model, ids), base)
        with without_lora(model):
            pass
        assert torch.equal(logits(model, ids), base), "an inner one ended the outer one"
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    loss.backward()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    for parameter, gradient in zip(adapter_parameters(model).values(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    with torch.no_grad():
        assert torch.equal(logits(model, ids), expected_logits)


def test_without_lora_ends_with_an_error(ids: Tensor) -> None:
    model = adapted()
    expected = logits(model, ids)
    with pytest.raises(ZeroDivisionError), without_lora(model):
        _ = 1 / 0
    assert torch.equal(logits(model, ids), expected)


@torch.no_grad()
def test_peft_loads_the_adapter_files(tmp_path: Path, ids: Tensor) -> None:
    from peft import PeftModel

    model = adapted()
    parameters = adapter_parameters(model)
    for name, content in adapter_files(model, parameters).items():
        (tmp_path / name).write_bytes(content)
    assert set(load((tmp_path / "adapter_model.safetensors").read_bytes())) == set(parameters)
    loaded: Any = PeftModel.from_pretrained(make_model(), tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@torch.no_grad()
def test_a_merged_model_is_saved_as_a_whole_model(tmp_path: Path, ids: Tensor) -> None:
    model = adapted()
    state = {weight.name: weight.merged(torch.float32) for weight in lora_weights(model)}
    model.save_pretrained(tmp_path, state_dict=state)
    assert not (tmp_path / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (logits(loaded, ids) - logits(model, ids)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("qwen3", ["q_porj"], r"no module 'q_porj'.*down_proj, gate_proj, k_proj.*all-linear"),
        ("qwen3", ["q_proj", "all-linear"], r"no module 'all-linear'.*all-linear on its own"),
        ("qwen3", [], r"no module is named.*q_proj"),
        ("qwen3", ["embed_tokens"], r"'embed_tokens' is the embedding, which cannot"),
        ("qwen3", ["lm_head"], r"'lm_head' is the output layer.*log-probs.*directly"),
        ("llama", ["q_proj", "lm_head"], r"'lm_head' is the output layer"),
        ("llama", ["mlp"], r"'mlp' names model\.layers\.0\.mlp, a LlamaMLP and not a linear"),
        ("llama", ["norm"], r"'norm' names model\.norm, a LlamaRMSNorm and not a linear"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    name: str, targets: list[str], message: str
) -> None:
    model = make_model(name)
    with pytest.raises(ModelError, match=message):
        add_lora(model, rank=2, alpha=4.0, target_modules=targets, seed=0)
    assert not has_lora(model)
