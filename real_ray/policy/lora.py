"""LoRA (arXiv 2106.09685) on a Hugging Face model: ``W x + alpha / rank * B A x``, W frozen.

The adapter is injected into the model, so that its parameters keep their Hugging Face names but for
``.base_layer`` before the end of an adapted layer's own: ``...q_proj.base_layer.weight``,
``...q_proj.lora_A.default.weight`` [rank, in] and ``...q_proj.lora_B.default.weight`` [out, rank].
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from real_ray.errors import ModelError

ALL_LINEAR = "all-linear"

_ADAPTER = "default"  # as transformers and peft name the only adapter of a model
_BASE = ".base_layer"


def add_lora(
    model: Any, *, rank: int, alpha: float, target_modules: Sequence[str], seed: int
) -> None:
    """Inject an adapter into a Hugging Face causal language model and freeze all else.

    The adapter does nothing at first (B is 0) and has the dtype of the layers that it adapts: an
    optimiser that keeps float32 master weights keeps them of the adapter too.

    Args:
        target_modules: linear layers to adapt, by the end of their names ("q_proj",
            "self_attn.q_proj"); ``["all-linear"]``: all but the output layer.
        seed: of A. Equal seeds give equal adapters.

    Raises:
        ModelError: a target names no layer, not a linear layer, or the embedding or output layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = lora_layers(model, target_modules)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a float works, only the annotation is int
        target_modules=names,
        task_type="CAUSAL_LM",
        base_model_name_or_path=getattr(model, "name_or_path", None),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Not model.add_adapter(): it makes save_pretrained() write nothing but adapters.
        inject_adapter_in_model(config, model, _ADAPTER)


def lora_layers(model: Any, target_modules: Sequence[str]) -> list[str]:
    """Names of the layers of a model without adapter that `add_lora` adapts.

    Raises:
        ModelError: as `add_lora`.
    """
    modules = dict(model.named_modules())
    kept = {
        id(model.get_input_embeddings()): "embedding",
        id(model.get_output_embeddings()): "output layer",
    }
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and id(module) not in kept
    ]
    known = ", ".join(sorted({name.rpartition(".")[-1] for name in linear})) or "none"
    where = f"learner.lora_target_modules: {type(model).__name__}"
    if list(target_modules) == [ALL_LINEAR]:
        if not linear:
            raise ModelError(f"{where} has no linear layers that could get an adapter")
        return linear
    found: list[str] = []
    for target in target_modules:
        matches = [name for name in modules if name == target or name.endswith(f".{target}")]
        for name in matches:
            if (kind := kept.get(id(modules[name]))) is not None:
                raise ModelError(
                    f"{where}: {target!r} is the {kind}, which cannot get an adapter: the learner "
                    "computes log-probs from its weight directly. Linear layers that can: "
                    f"{known}"
                )
            if name not in linear:
                raise ModelError(
                    f"{where}: {target!r} names {name}, a {type(modules[name]).__name__} and not a "
                    f"linear layer. Linear layers: {known}"
                )
        if not matches:
            alone = " on its own" if target == ALL_LINEAR else ""
            raise ModelError(
                f"{where} has no module {target!r}. Linear layers: {known}, or {ALL_LINEAR}{alone}"
            )
        found += [name for name in matches if name not in found]
    if not found:
        raise ModelError(f"{where}: no module is named. Linear layers: {known}, or {ALL_LINEAR}")
    return found


def has_lora(model: nn.Module) -> bool:
    """Whether `add_lora` was called on this model."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


@contextlib.contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """The base model itself, such as the reference policy of a KL term.

    Gradients, ``requires_grad`` and the optimiser are untouched, so this may stand anywhere between
    two backward passes, under any ZeRO stage. A model without adapter stays as it is.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    try:
        # peft's enable_adapters() does this and toggles requires_grad, which DeepSpeed reads when
        # it reduces gradients.
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the adapter and not to the base model."""
    return f".lora_A.{_ADAPTER}." in name or f".lora_B.{_ADAPTER}." in name


def hugging_face_name(name: str) -> str:
    """Name of a base model's parameter in a checkpoint without adapter."""
    return name.replace(f"{_BASE}.", ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeight:
    """A parameter of the base model and what the adapter adds to it."""

    name: str  # in a checkpoint without adapter
    base: nn.Parameter
    factors: tuple[nn.Parameter, nn.Parameter] | None  # A [rank, in] and B [out, rank]
    scale: float

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that `merged` reads: what ZeRO-3 has to gather."""
        return [self.base, *(self.factors or ())]

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensor:
        """A copy of ``W + alpha / rank * B A``, computed in float32 and rounded to ``dtype``."""
        if self.factors is None:
            return self.base.detach().to(dtype, copy=True)
        a, b = (factor.detach().float() for factor in self.factors)
        return torch.addmm(self.base.detach().float(), b, a, alpha=self.scale).to(dtype)


def lora_weights(model: nn.Module) -> Iterator[LoraWeight]:
    """All parameters of the base model, in the order of the model; tied ones once."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        layer, _, rest = name.partition(f"{_BASE}.")
        factors, scale = None, 1.0
        if rest == "weight":
            tuner: Any = model.get_submodule(layer)
            factors = tuner.lora_A[_ADAPTER].weight, tuner.lora_B[_ADAPTER].weight
            scale = tuner.scaling[_ADAPTER]
        yield LoraWeight(name=hugging_face_name(name), base=parameter, factors=factors, scale=scale)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the adapter under their names in an adapter file of peft.

    Example: ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``
    """
    return {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }


def adapter_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Contents of the files of an adapter directory, as peft and vLLM load it, by their names.

    Args:
        tensors: full values of all `adapter_parameters`.
    """
    from safetensors.torch import save

    config = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in model.peft_config[_ADAPTER].to_dict().items()
    } | {"inference_mode": True}
    return {
        "adapter_config.json": json.dumps(config, indent=2, sort_keys=True).encode(),
        "adapter_model.safetensors": save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            metadata={"format": "pt"},
        ),
    }
