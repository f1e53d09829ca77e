"""Checkpoints on disk: what is in them, which one a path means, and how one appears complete.

A checkpoint is a directory:

==================  ============================================================================
``checkpoint.json``  `CheckpointFacts`, shapes of the trained parameters, size of every file
``driver.json``      `DriverState`: which prompts are done, and which groups are buffered
``groups/``          the buffered groups, a file each
``deepspeed/``       DeepSpeed's state: weights, master weights, optimiser, schedule
``random/``          state of the random number generators of each rank
``model/``           Hugging Face config, tokenizer, and the adapter's config with LoRA; no weights
``universal/``       made from ``deepspeed/`` when another number of ranks loads it
==================  ============================================================================

With LoRA the frozen base model is not in it: it is loaded again from where it came from.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import real_ray
from real_ray.errors import CheckpointError

STATE, MODEL, UNIVERSAL = "deepspeed", "model", "universal"
GROUPS, RANDOM = "groups", "random"
FACTS, DRIVER = "checkpoint.json", "driver.json"
_FORMAT = 2

logger = logging.getLogger(__name__)


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


def partial_of(directory: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return directory.with_name(f".{directory.name}.partial")


def begin(directory: Path) -> None:
    """Make `partial_of` a checkpoint, empty."""
    _finish_replacing(directory)
    partial = partial_of(directory)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that died while saving
    partial.mkdir(parents=True)


def complete(
    directory: Path, *, facts: CheckpointFacts, parameters: Mapping[str, list[int]]
) -> None:
    """Give what is in `partial_of` a checkpoint its name, in place of an earlier checkpoint.

    Args:
        parameters: name and shape of each trained parameter.
    """
    partial = partial_of(directory)
    files = {
        str(path.relative_to(partial)): path.stat().st_size
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    content = {
        "format": _FORMAT,
        "real_ray": real_ray.__version__,
        **asdict(facts),
        "parameters": parameters,
        "files": files,
    }
    (partial / FACTS).write_text(json.dumps(content, indent=1) + "\n")
    sync_to_disk(partial)
    _replace(directory, partial)


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


def read_parameters(directory: Path) -> dict[str, list[int]]:
    """Name and shape of each parameter that the checkpoint has been trained with.

    Raises:
        CheckpointError: it is not a checkpoint, or of another version.
    """
    parameters: dict[str, list[int]] = _content(directory)["parameters"]
    return parameters


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


def resolve(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest complete one of a run.

    Raises:
        CheckpointError: it is damaged, or there is none.
    """
    _finish_replacing(path)
    if (path / FACTS).is_file() or not (path / "checkpoints").is_dir():
        read_facts(path)
        return path
    newest = newest_complete(path)
    if newest is None:
        raise CheckpointError(
            f"the run {path} has no complete checkpoint: checkpoint.save_steps has a run save some"
        )
    return newest


def newest_complete(run_directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, if it has one; warn of newer damaged ones."""
    found = _by_number(run_directory / "checkpoints")
    for number in sorted(found, reverse=True):
        try:
            read_facts(found[number])
        except CheckpointError as error:
            logger.warning("checkpoint left out: %s", error)
        else:
            return found[number]
    return None


def remove_older(directory: Path, *, keep: int) -> None:
    """Remove the oldest complete checkpoints beside a new one, so that ``keep`` are left with it.

    Damaged and newer ones stay. What cannot be removed stays with a warning.
    """
    for left in directory.parent.glob(".step_*.removed"):  # by a run that died meanwhile
        shutil.rmtree(left, ignore_errors=True)
    found = _by_number(directory.parent)
    own = next(number for number, path in found.items() if path == directory)
    older = [found[n] for n in sorted(found) if n < own and _is_complete(found[n])]
    for path in older[: max(0, len(older) + 1 - keep)]:
        # At once, so that none is ever there in part.
        removed = path.with_name(f".{path.name}.removed")
        try:
            path.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            logger.warning("the checkpoint %s cannot be removed: %s", path, error)


def sync_to_disk(directory: Path) -> None:
    """Force a directory with all that is in it to disk, so that a rename cannot get ahead of it."""
    for path in [*directory.rglob("*"), directory]:
        _fsync(path)


def _by_number(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints ``step_N`` of a run by N, whatever state they are in."""
    for aside in checkpoints.glob(".step_*.replaced"):
        _finish_replacing(checkpoints / aside.name.removeprefix(".").removesuffix(".replaced"))
    return {
        int(entry.name.removeprefix("step_")): entry
        for entry in checkpoints.glob("step_*")
        if entry.name.removeprefix("step_").isdecimal()
    }


def _is_complete(directory: Path) -> bool:
    try:
        read_facts(directory)
    except CheckpointError:
        return False
    return True


def _content(directory: Path) -> dict[str, Any]:
    file = directory / FACTS
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        state = "has no checkpoint.json" if directory.is_dir() else "does not exist"
        raise CheckpointError(
            f"{directory} {state}: give a complete checkpoint, as in runs/NAME/checkpoints/step_N, "
            "which a run saves with checkpoint.save_steps"
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
