"""Reloading the weights of a vLLM model in place, layer by layer, also after an interruption."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def begin_reload(model: nn.Module) -> None:
    """Make a model ready for new weights; `abandon_reload` comes first after an interruption."""
    initialize_layerwise_reload(model)


def end_reload(model: nn.Module, model_config: Any) -> None:
    """Make a model ready to run after all its weights were loaded."""
    finalize_layerwise_reload(model, model_config)


def abandon_reload(model: nn.Module, model_config: Any) -> bool:
    """Make a model runnable that was interrupted while it was reloaded.

    Layers that were complete keep their new weights, all others get their old ones back. Without
    this, what a layer has of the interrupted update would count as part of the next one, which
    would end too early and leave old weights and memory that was never written.

    Returns:
        Whether there was anything to abandon.
    """
    infos = [get_layerwise_info(layer) for layer in model.modules()]
    begun = [info for info in infos if info.can_load()]
    for info in begun:
        info.loaded_weights = []
        info.load_numel = info.load_numel_total = 0  # no warnings, either
    if begun:
        finalize_layerwise_reload(model, model_config)
    return bool(begun)


def parameter_names(model: nn.Module, model_config: Any) -> set[str]:
    """Parameters that `load_weights` of a whole checkpoint reports as loaded.

    None for quantised models, of whose parameters some follow from others. vLLM makes the same
    exception when it checks what it has loaded from a directory.
    """
    if getattr(model_config, "quantization", None) is not None:
        return set()
    return {name for name, _ in model.named_parameters()}


def unfinished_layers(model: nn.Module) -> list[str]:
    """Layers that got some of their weights, but not all, since `begin_reload`."""
    return [
        name
        for name, layer in model.named_modules()
        if (info := get_layerwise_info(layer)).can_load()
        and 0 < info.load_numel < info.load_numel_total
        and not is_deferred_attention_layer(layer)
        # Its weight has rows that no checkpoint has.
        and not isinstance(layer, VocabParallelEmbedding)
    ]
