"""Models that mix up the sequences of a forward pass are found before anything is trained."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from tiny_sizes import SIZES, VOCABULARY
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from real_ray.batching import Layout
from real_ray.errors import ModelError
from real_ray.policy import Policy, PolicyInput, check_layout
from real_ray.policy.attention import SEGMENTS, register

CPU = torch.device("cpu")
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
WIDE = {**SIZES, "initializer_range": 0.3}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def make_policy(family: str, attention: str, dtype: torch.dtype = torch.float32) -> Policy:
    register()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = (
            Qwen3ForCausalLM._from_config(Qwen3Config(**WIDE), attn_implementation=attention)
            if family == "qwen3"
            else LlamaForCausalLM._from_config(LlamaConfig(**WIDE), attn_implementation=attention)
        )
    return Policy(model.to(dtype))


def check(policy: Any, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
    check_layout(policy, layout=layout, vocabulary=VOCABULARY, dtype=dtype, device=CPU)


@each_layout
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_pass(family: str, layout: Layout, dtype: torch.dtype) -> None:
    policy = make_policy(family, "sdpa" if layout == "padded" else SEGMENTS, dtype)
    check(policy, layout, dtype)


ADVICE = {
    "padded": r"\(padded\).*use another model",
    "packed": r"\(packed\).*set learner\.packing: false and learner\.share_prefix: false",
    "shared_prefix": r"\(shared_prefix\).*set learner\.share_prefix: false",
}


@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_to_whatever_is_in_the_row_is_found(layout: Layout, dtype: torch.dtype) -> None:
    policy = make_policy("qwen3", "sdpa", dtype)

    def forgetful(inputs: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
        hidden = policy.model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            # Without a mask, restarting positions would tell of packed sequences.
            attention_mask=torch.ones_like(inputs.input_ids),
            use_cache=False,
        ).last_hidden_state
        head = policy.model.get_output_embeddings()
        logprobs, entropy = head(hidden.flatten(0, 1)[inputs.predicts], inputs.tokens, temperature)
        return logprobs, entropy

    with pytest.raises(ModelError, match=rf"^log-probs of several .*{ADVICE[layout]}"):
        check(forgetful, layout, dtype)


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_positions_that_do_not_restart_are_found(layout: Layout) -> None:
    policy = make_policy("qwen3", SEGMENTS)

    def counting(inputs: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
        inputs.position_ids.copy_(torch.arange(inputs.input_ids.shape[1]))
        logprobs, entropy = policy(inputs, temperature)
        return logprobs, entropy

    if layout == "packed":  # rotary positions are relative: each sequence is only shifted
        check(counting, layout)
        return
    with pytest.raises(ModelError, match=ADVICE[layout]):
        check(counting, layout)


def test_log_probs_that_are_not_numbers_are_found() -> None:
    def broken(inputs: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
        nothing = torch.full(inputs.tokens.shape, torch.nan)
        return nothing, nothing

    with pytest.raises(ModelError, match="differ from those of each sequence alone by nan nats"):
        check(broken, "packed")
