"""Checkpoints for another number of ranks: DeepSpeed's universal checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from actors.checkpoint_files import STATE, UNIVERSAL, CheckpointFacts, read_facts, sync_to_disk
from real_ray.errors import LearnerError


def needs_conversion(saved: CheckpointFacts, world_size: int) -> bool:
    """Whether so many ranks cannot load the checkpoint as it was saved."""
    return saved.zero_stage > 0 and saved.world_size != world_size  # ZeRO 0 has all on each rank


def deepspeed_checkpoint_config(directory: Path, world_size: int) -> dict[str, Any]:
    """What the config of an engine must contain to `load` this checkpoint with so many ranks."""
    if needs_conversion(read_facts(directory), world_size):
        return {"checkpoint": {"load_universal": True}}
    return {}


def prepare(directory: Path, num_ranks: int) -> None:
    """Do beforehand, in this process, what so many ranks would wait for while they load it.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        LearnerError: it cannot be converted.
    """
    if needs_conversion(read_facts(directory), num_ranks):
        # DeepSpeed, imported for this, looks for GPUs and prints that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        convert_to_universal(directory)


def universal_checkpoint_info() -> dict[str, Any]:
    """What ds_to_universal wants to find in a checkpoint of ZeRO 1 and 2."""
    from deepspeed.checkpoint import constants

    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
        }
    }


def convert_to_universal(directory: Path) -> Path:
    """Make ``universal/`` of a checkpoint, once: state by parameter, for any number of ranks.

    One process, without a process group; about twice the time and the space of the optimiser
    state.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        LearnerError: it cannot be converted.
    """
    from deepspeed.checkpoint import ds_to_universal

    read_facts(directory)
    universal, partial = directory / UNIVERSAL, directory / f".{UNIVERSAL}.partial"
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
        (directory / f"latest_{UNIVERSAL}").unlink(missing_ok=True)  # `load` names it itself
        sync_to_disk(partial)
        partial.rename(universal)
    except (OSError, RuntimeError) as error:
        raise LearnerError(
            f"cannot convert the checkpoint {directory} for another number of ranks: {error}. "
            "It needs write permission and space there"
        ) from error
    return universal


def repair_optimizer(optimizer: torch.optim.Optimizer, universal: Path) -> None:
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
