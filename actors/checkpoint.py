"""Checkpoints of the learner: what is in them, and how they are saved and loaded by all ranks.

A checkpoint is a directory:

==================  ============================================================================
``checkpoint.json``  `CheckpointFacts`, shapes of the trained parameters, size of every file
``deepspeed/``       DeepSpeed's state: weights, master weights, optimiser, schedule
``model/``           Hugging Face config, tokenizer, and the adapter's config with LoRA; no weights
``universal/``       made from ``deepspeed/`` when another number of ranks loads it
==================  ============================================================================

With LoRA the frozen base model is not in it: it is loaded again from where it came from.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import real_ray
from real_ray.errors import CheckpointError, LearnerError

STATE, MODEL, FACTS = "deepspeed", "model", "checkpoint.json"
_UNIVERSAL = "universal"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Where a checkpoint comes from, and what a learner must have in common with it to load it."""

    policy_version: int
    world_size: int
    zero_stage: int
    dtype: str  # "bfloat16" or "float32"
    base_model: str  # directory or hub name
    trust_remote_code: bool
    lora_rank: int  # 0: all parameters are trained
    lora_alpha: float
    lora_target_modules: tuple[str, ...]


def save(engine: Any, directory: Path, *, facts: CheckpointFacts, tokenizer: Any) -> None:
    """Write a checkpoint; all ranks together, to a file system that they share.

    It appears under its name when it is complete. One that is there already under this name is
    replaced then, and not touched before.

    Args:
        engine: a `DeepSpeedEngine` whose module has the Hugging Face model as ``model``.
        directory: the checkpoint; its parents are created.

    Raises:
        LearnerError: it cannot be written.
    """
    partial = directory.with_name(f".{directory.name}.partial")

    def begin() -> None:
        _finish_replacing(directory)
        shutil.rmtree(partial, ignore_errors=True)  # of a run that died while saving
        partial.mkdir(parents=True)

    def complete() -> None:
        _write_model_files(engine.module.model, partial / MODEL, facts, tokenizer)
        for script in partial.glob("*.py"):
            script.unlink()  # DeepSpeed's converters; `real-ray export` does their work
        num_shards = len(list((partial / STATE).glob("*_optim_states.pt")))
        if facts.zero_stage > 0 and num_shards != facts.world_size:
            raise LearnerError(
                f"{directory} has the optimiser state of {num_shards} of {facts.world_size} "
                "learner ranks: all nodes must see it at the same path. Put the run directory on "
                "a shared file system"
            )
        files = {
            str(path.relative_to(partial)): path.stat().st_size
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        content = {
            "format": _FORMAT,
            "real_ray": real_ray.__version__,
            **asdict(facts),
            "parameters": _parameter_shapes(engine),
            "files": files,
        }
        (partial / FACTS).write_text(json.dumps(content, indent=1) + "\n")
        _sync_to_disk(partial)
        _replace(directory, partial)

    try:
        _on_rank_0(begin)
        with _frozen_left_out(engine.module, enabled=facts.lora_rank > 0):
            engine.save_checkpoint(
                str(partial),
                tag=STATE,
                client_state=_universal_checkpoint_info(),
                save_latest=False,
                exclude_frozen_parameters=facts.lora_rank > 0,
            )
        _on_rank_0(complete)
    except (OSError, RuntimeError) as error:
        if isinstance(error, LearnerError):
            raise
        raise LearnerError(
            f"cannot save the checkpoint {directory}: {error}. Is there space, and may the run "
            "write there?"
        ) from error


def load(engine: Any, directory: Path, *, facts: CheckpointFacts) -> CheckpointFacts:
    """Bring a fresh engine into the state of a checkpoint; all ranks together.

    With as many ranks as saved it, and at ZeRO stage 0, training goes on to the bit. Another number
    of ranks goes through `convert_to_universal`, on rank 0, while the others wait within the
    time-out of the process group.

    Args:
        engine: built with `deepspeed_checkpoint_config` merged into its config, not yet trained.
        facts: of the run that loads; ``policy_version`` and ``world_size`` do not matter.

    Returns:
        The facts of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or does not fit the run.
        LearnerError: rank 0 could not convert it.
    """
    saved = check_fits(directory, facts)
    _check_parameters(engine, directory)
    universal = _needs_conversion(saved, dist.get_world_size())
    assert engine.load_universal_checkpoint() == universal, "see deepspeed_checkpoint_config"
    if universal:
        _on_rank_0(lambda: convert_to_universal(directory))
    engine.load_checkpoint(
        str(directory),
        tag=_UNIVERSAL if universal else STATE,
        load_module_strict=saved.lora_rank == 0,
    )
    if universal:
        _repair_optimizer(engine.optimizer.optimizer, directory / _UNIVERSAL)
    return saved


def deepspeed_checkpoint_config(directory: Path, world_size: int) -> dict[str, Any]:
    """What the config of an engine must contain to `load` this checkpoint with so many ranks."""
    if _needs_conversion(read_facts(directory), world_size):
        return {"checkpoint": {"load_universal": True}}
    return {}


def read_facts(directory: Path) -> CheckpointFacts:
    """Read ``checkpoint.json`` and check that the files it lists are there.

    Raises:
        CheckpointError: it is not a checkpoint, not a complete one, or of another version.
    """
    content = _content(directory)
    for name, size in content["files"].items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"{path} {state}, expected {size} bytes: the checkpoint is damaged. Use an "
                "earlier one"
            )
    return CheckpointFacts(
        policy_version=content["policy_version"],
        world_size=content["world_size"],
        zero_stage=content["zero_stage"],
        dtype=content["dtype"],
        base_model=content["base_model"],
        trust_remote_code=content["trust_remote_code"],
        lora_rank=content["lora_rank"],
        lora_alpha=content["lora_alpha"],
        lora_target_modules=tuple(content["lora_target_modules"]),
    )


def check_fits(directory: Path, facts: CheckpointFacts) -> CheckpointFacts:
    """Return the facts of a checkpoint that a run with these facts can load.

    Raises:
        CheckpointError: it cannot; names the key, both values and what to do.
    """
    saved = read_facts(directory)
    keys = {
        "zero_stage": "learner.zero_stage",
        "dtype": "learner.dtype",
        "lora_rank": "learner.lora_rank",
        "lora_alpha": "learner.lora_alpha",
        "lora_target_modules": "learner.lora_target_modules",
    }
    if saved.lora_rank == facts.lora_rank == 0:
        del keys["lora_alpha"], keys["lora_target_modules"]  # without LoRA they mean nothing
    for field, key in keys.items():
        before, wanted = getattr(saved, field), getattr(facts, field)
        if before != wanted:
            raise CheckpointError(
                f"{directory / FACTS}: the checkpoint was saved with {key} = {_shown(before)}, but "
                f"it is {_shown(wanted)} now: set it to {_shown(before)}, or start a new run from "
                "the model that `real-ray export` makes of the checkpoint"
            )
    return saved


def convert_to_universal(directory: Path) -> Path:
    """Make ``universal/`` of a checkpoint, once: state by parameter, for any number of ranks.

    One process, without a process group; about twice the time and the space of the optimiser
    state. A launcher may call it before the ranks are started, so that none of them waits for it.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        LearnerError: it cannot be converted.
    """
    from deepspeed.checkpoint import ds_to_universal

    read_facts(directory)
    universal, partial = directory / _UNIVERSAL, directory / f".{_UNIVERSAL}.partial"
    if universal.is_dir():
        return universal
    log = io.StringIO()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        # It prints its progress.
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(directory / STATE),
                    output_folder=str(partial),
                    num_extract_workers=1,  # a fork of this process would have its threads' locks
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=False,
                )
            )
        (directory / f"latest_{_UNIVERSAL}").unlink(missing_ok=True)  # `load` names it itself
        _sync_to_disk(partial)
        partial.rename(universal)
    except (OSError, RuntimeError) as error:
        raise LearnerError(
            f"cannot convert the checkpoint {directory} for another number of ranks: {error}. "
            "It needs write permission and space there"
        ) from error
    return universal


def resolve(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest one of a run directory.

    Raises:
        CheckpointError: there is none.
    """
    _finish_replacing(path)
    if (path / FACTS).is_file() or not (path / "checkpoints").is_dir():
        return path
    found = [
        (int(entry.name.removeprefix("step_")), entry)
        for entry in (path / "checkpoints").glob("step_*")
        if entry.name.removeprefix("step_").isdecimal()
    ]
    if not found:
        raise CheckpointError(
            f"{path / 'checkpoints'} has no checkpoint step_N: set checkpoint.save_steps to have "
            "a run save some"
        )
    return max(found)[1]


def _content(directory: Path) -> dict[str, Any]:
    file = directory / FACTS
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        state = "has no checkpoint.json" if directory.is_dir() else "does not exist"
        raise CheckpointError(
            f"{directory} {state}: give a complete checkpoint, as in runs/NAME/checkpoints/step_N"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != _FORMAT:
        raise CheckpointError(
            f"{file} has format {version}, and this real-ray {real_ray.__version__} reads format "
            f"{_FORMAT}: use the real-ray that wrote it"
        )
    assert isinstance(content, dict)
    return content


def _needs_conversion(saved: CheckpointFacts, world_size: int) -> bool:
    return saved.zero_stage > 0 and saved.world_size != world_size  # ZeRO 0 has all on each rank


def _check_parameters(engine: Any, directory: Path) -> None:
    saved: dict[str, list[int]] = _content(directory)["parameters"]
    here = _parameter_shapes(engine)
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"{directory / FACTS}: the parameter {name} has shape {saved.get(name)} in the "
                f"checkpoint and {here.get(name)} in the model: set model.name_or_path to the "
                f"model that was trained ({_content(directory)['base_model']})"
            )


def _parameter_shapes(engine: Any) -> dict[str, list[int]]:
    # Under ZeRO-3 a partitioned parameter has shape (0,); its true one is in ds_shape.
    return {
        name: list(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def _universal_checkpoint_info() -> dict[str, Any]:
    """What ds_to_universal wants to find in a checkpoint of ZeRO 1 and 2."""
    from deepspeed.checkpoint import constants

    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        }
    }


def _repair_optimizer(optimizer: torch.optim.Optimizer, universal: Path) -> None:
    """Undo what loading a universal checkpoint does to an optimiser with several groups.

    Under ZeRO-3 it gives the settings of the first group, weight decay among them, to all, and one
    tensor, which is then counted up once a group, as their common step.
    """
    saved = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    for parameter, state in optimizer.state.items():
        # A fused optimiser wants it where the parameter is.
        state["step"] = torch.tensor(
            float(state["step"]), dtype=torch.float32, device=parameter.device
        )


def _write_model_files(model: Any, directory: Path, facts: CheckpointFacts, tokenizer: Any) -> None:
    model.config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.save_pretrained(directory)
    if facts.trust_remote_code:
        for code in Path(facts.base_model).glob("*.py"):  # none for a name on the hub
            shutil.copy(code, directory)


@contextlib.contextmanager
def _frozen_left_out(module: torch.nn.Module, *, enabled: bool) -> Iterator[None]:
    """Keep frozen parameters out of the module's state dict.

    DeepSpeed's own exclusion misses the second name of a tied parameter, such as the output layer.
    """
    if not enabled:
        yield
        return
    frozen = {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }

    def drop(_module: torch.nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        for name in frozen & state.keys():
            del state[name]

    handle = module.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


def _on_rank_0(action: Callable[[], object]) -> None:
    """Run it on rank 0 while the others wait; they fail together.

    Raises:
        LearnerError: on the other ranks, when rank 0 raised something.
    """
    failure: list[str | None] = [None]
    try:
        if dist.get_rank() == 0:
            action()
    except Exception as error:
        failure[0] = str(error)
        raise
    finally:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise LearnerError(f"rank 0: {failure[0]}")


def _sync_to_disk(directory: Path) -> None:
    """Force a directory with all that is in it to disk, so that a rename cannot get ahead of it."""
    for path in [*directory.rglob("*"), directory]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(directory: Path, complete: Path) -> None:
    """Give a complete checkpoint its name. A directory cannot be renamed over one that has files,
    so an earlier one steps aside first; `_finish_replacing` undoes that after a crash."""
    aside = _aside(directory)
    if directory.exists():
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    complete.rename(directory)
    _fsync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _finish_replacing(directory: Path) -> None:
    aside = _aside(directory)
    if aside.exists() and not directory.exists():
        aside.rename(directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
