"""Make a Hugging Face directory of a checkpoint, in one process and without a process group."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.checkpoint_files import MODEL, STATE, CheckpointFacts, read_facts, resolve
from real_ray.errors import CheckpointError, ModelError, UserError
from real_ray.policy.lora import adapter_files, adapter_parameters, add_lora, lora_weights

_PREFIX = "model."  # of the Hugging Face model in the learner's module
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What `export` wrote."""

    directory: Path
    num_tensors: int
    dtype: str
    policy_version: int


def export(path: Path, directory: Path, *, adapter: bool = False) -> Exported:
    """Write the weights of a checkpoint, in the dtype of the training, with config and tokenizer.

    They equal the learner's to the bit. With LoRA they are the base model with the adapter merged
    in, as generators get them, or the adapter alone.

    Args:
        path: a checkpoint, or a run directory: its newest one.
        directory: to be made; appears when it is complete.
        adapter: write an adapter directory, as peft and vLLM load it.

    Raises:
        CheckpointError: there is no complete checkpoint, or it has no adapter.
        ModelError: the base model of the adapter cannot be loaded.
        UserError: the directory is not empty.
    """
    # transformers imports DeepSpeed, which looks for GPUs and prints that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is not empty: give a directory that does not exist yet")
    checkpoint = resolve(path)
    facts = read_facts(checkpoint)
    if adapter and facts.lora_rank == 0:
        raise CheckpointError(
            f"{checkpoint} has no adapter, because all parameters were trained "
            "(learner.lora_rank 0): export it without --adapter"
        )
    tensors = _trained_tensors(checkpoint, facts)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        if facts.lora_rank == 0:
            num_tensors = _write_model(partial, checkpoint, facts, tensors)
        else:
            model = _with_adapter(facts, tensors)
            if adapter:
                num_tensors = _write_adapter(partial, model)
            else:
                dtype = getattr(torch, facts.dtype)
                merged = {weight.name: weight.merged(dtype) for weight in lora_weights(model)}
                merged |= dict(model.named_buffers())
                num_tensors = _write_model(partial, checkpoint, facts, merged)
        for file in (checkpoint / MODEL).iterdir():
            if file.name not in {"config.json", *_ADAPTER_FILES}:
                shutil.copy(file, partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        directory=directory,
        num_tensors=num_tensors,
        dtype=facts.dtype,
        policy_version=facts.policy_version,
    )


def _trained_tensors(checkpoint: Path, facts: CheckpointFacts) -> Tensors:
    """Parameters of the checkpoint, and buffers, by their names in the Hugging Face model."""
    if facts.zero_stage < 3:
        # Whole, and as the learner computes with them.
        state = torch.load(
            checkpoint / STATE / "mp_rank_00_model_states.pt",
            map_location="cpu",
            weights_only=False,
        )["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        log = io.StringIO()
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):  # its progress
            state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=STATE)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}


def _write_model(
    directory: Path, checkpoint: Path, facts: CheckpointFacts, tensors: Tensors
) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        checkpoint / MODEL, trust_remote_code=facts.trust_remote_code
    )
    dtype = getattr(torch, facts.dtype)
    with torch.device("meta"):  # for names, and for the layout of files that its class has
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=facts.trust_remote_code
        )
    names = {name for name, _ in model.named_parameters()}  # tied ones once
    if missing := sorted(names - tensors.keys()):
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} parameters of {type(model).__name__}, the first "
            f"is {missing[0]}: it was saved with another version of transformers. Install that "
            "version"
        )
    persistent = model.state_dict().keys()
    state = {
        name: tensor.to(dtype) if name in names else tensor
        for name, tensor in tensors.items()
        if name in names or (name in persistent and name in dict(model.named_buffers()))
    }
    num_tensors = len(state)
    model.save_pretrained(directory, state_dict=state)  # which takes the tensors out of it
    return num_tensors


def _with_adapter(facts: CheckpointFacts, tensors: Tensors) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            facts.base_model,
            dtype=getattr(torch, facts.dtype),
            trust_remote_code=facts.trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"the base model {facts.base_model}, which the adapter was trained on and which is not "
            f"part of the checkpoint, cannot be loaded: {error}. Put it back there"
        ) from error
    add_lora(
        model,
        rank=facts.lora_rank,
        alpha=facts.lora_alpha,
        target_modules=facts.lora_target_modules,
        seed=0,  # overwritten
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if trained.keys() - tensors.keys():
        raise CheckpointError(
            f"{facts.base_model} has layers for an adapter that the checkpoint has not: it is "
            "another model than the one that was trained"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])
    return model


def _write_adapter(directory: Path, model: Any) -> int:
    tensors = {name: p.detach() for name, p in adapter_parameters(model).items()}
    for name, content in adapter_files(model, tensors).items():
        (directory / name).write_bytes(content)
    return len(tensors)
