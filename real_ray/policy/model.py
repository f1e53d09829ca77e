"""The policy: a Hugging Face causal language model that answers with log-probs."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from real_ray.errors import ModelError
from real_ray.policy.attention import SEGMENTS, register
from real_ray.policy.layout import PolicyInput
from real_ray.policy.logprobs import linear_logprobs

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class Policy(nn.Module):
    """Log-probs of completion tokens under a causal language model.

    The output layer is computed in float32, as in the generators (vLLM's `head_dtype`): logits of
    16 and more are rounded to steps of 0.125 in bfloat16, as much as the scores of REAL differ.

    Args:
        model: `AutoModelForCausalLM`; its output layer answers to `forward` of this class only.

    Raises:
        ModelError: the model does more to its logits than a scale.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        for name in _CAPS:
            if getattr(config, name, None) is not None:
                raise ModelError(
                    f"{type(model).__name__} caps its logits ({name}), which the learner does not "
                    "compute: use another model"
                )
        self._scale = _logit_scale(config)
        self.model = model
        head = model.get_output_embeddings()
        # Through `forward` of the layer, so that ZeRO-3 gathers its weight.
        head.forward = MethodType(_head_logprobs, head)

    def forward(self, inputs: PolicyInput, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs [T] with a graph, and entropies in nats [T] without, of ``inputs.tokens``.

        Args:
            temperature: of the sampling, above 0.
        """
        hidden = self.model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            segments=inputs.segments,
            use_cache=False,
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        logprobs, entropy = head(
            hidden.flatten(0, 1).index_select(0, inputs.predicts),
            inputs.tokens,
            temperature / self._scale,
        )
        return logprobs, entropy


def _logit_scale(config: Any) -> float:
    """What a model multiplies its logits by, as `transformers` computes it."""
    multiplier = getattr(config, "logit_scale", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    if config.model_type == "hyperclovax":  # multiplies; all others divide
        return float(multiplier * scaling)
    return float(multiplier / scaling)


def load_policy(
    name_or_path: str, *, dtype: torch.dtype, packing: bool, trust_remote_code: bool
) -> Policy:
    """Load a model from a Hugging Face directory or the hub.

    Args:
        packing: for packed rows; otherwise for padded ones.

    Raises:
        ModelError: the model cannot be loaded, or its attention cannot be replaced for packing.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=dtype,
            attn_implementation=SEGMENTS if packing else "sdpa",
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {name_or_path}: {error}") from error
    except KeyError as error:  # some models look attention up in a table of their own
        if error.args != (SEGMENTS,):
            raise
        raise _cannot_pack(name_or_path) from error
    if packing and not model._supports_attention_backend:
        raise _cannot_pack(name_or_path)
    return Policy(model)


def _cannot_pack(name_or_path: str) -> ModelError:
    return ModelError(
        f"model {name_or_path}: its attention cannot be replaced, as packed rows need: set "
        "learner.packing: false and learner.share_prefix: false"
    )


def _head_logprobs(
    head: Any, hidden: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    return linear_logprobs(hidden, head.weight, head.bias, tokens, temperature)
