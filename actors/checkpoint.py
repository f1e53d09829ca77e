"""Saving and loading checkpoints of the learner, by all its ranks together."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actors.buffered_groups import write_groups
from actors.checkpoint_files import (
    DRIVER,
    FACTS,
    MODEL,
    RANDOM,
    STATE,
    UNIVERSAL,
    CheckpointFacts,
    begin,
    check_fits,
    complete,
    partial_of,
    read_facts,
    read_parameters,
    remove_older,
)
from actors.universal import (
    convert_to_universal,
    needs_conversion,
    repair_optimizer,
    universal_checkpoint_info,
)
from real_ray.checkpoint import DriverState, to_json
from real_ray.errors import CheckpointError, LearnerError
from real_ray.types import RolloutGroup


def save(
    engine: Any,
    directory: Path,
    *,
    facts: CheckpointFacts,
    tokenizer: Any,
    driver: DriverState,
    groups: Sequence[RolloutGroup] = (),
    save_total_limit: int | None = None,
) -> None:
    """Write a checkpoint; all ranks together, to a file system that they share.

    It appears under its name when it is complete. One that is there already under this name is
    replaced then, and not touched before.

    Args:
        engine: a `DeepSpeedEngine` whose module has the Hugging Face model as ``model``.
        directory: the checkpoint; its parents are created.
        groups: on rank 0, the groups of ``driver.buffered`` in its order.
        save_total_limit: then keep so many with this one; None: all.

    Raises:
        LearnerError: it cannot be written.
    """
    partial = partial_of(directory)

    def finish() -> None:
        _write_model_files(engine.module.model, partial / MODEL, facts, tokenizer)
        for script in partial.glob("*.py"):
            script.unlink()  # DeepSpeed's converters; `real-ray export` does their work
        num_ranks = len(list((partial / RANDOM).iterdir()))
        if num_ranks != facts.world_size:
            raise LearnerError(
                f"{directory} has the state of {num_ranks} of {facts.world_size} learner ranks: "
                "all nodes must see it at the same path. Put the run directory on a shared file "
                "system"
            )
        (partial / DRIVER).write_text(to_json(driver), encoding="utf-8")
        numbers = [buffered.number for buffered in driver.buffered]
        write_groups(partial, dict(zip(numbers, groups, strict=True)))
        complete(directory, facts=facts, parameters=_parameter_shapes(engine))
        if save_total_limit is not None:
            remove_older(directory, keep=save_total_limit)

    try:
        _on_rank_0(lambda: begin(directory))
        _save_random_state(partial / RANDOM)
        with _frozen_left_out(engine.module, enabled=facts.lora_rank > 0):
            engine.save_checkpoint(
                str(partial),
                tag=STATE,
                client_state=universal_checkpoint_info(),
                save_latest=False,
                exclude_frozen_parameters=facts.lora_rank > 0,
            )
        _on_rank_0(finish)
    except (OSError, RuntimeError) as error:
        if isinstance(error, LearnerError):
            raise
        raise LearnerError(
            f"cannot save the checkpoint {directory}: {error}. Is there space, and may the run "
            "write there?"
        ) from error


def load(engine: Any, directory: Path, *, facts: CheckpointFacts) -> CheckpointFacts:
    """Bring a fresh engine into the state of a checkpoint; all ranks together.

    With as many ranks as saved it training goes on to the bit, random numbers included. Another
    number of ranks keeps its own random numbers, and above ZeRO stage 0 it goes through
    `convert_to_universal`: on rank 0 while the others wait within the time-out of the process
    group, unless `prepare` has done it before.

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
    universal = needs_conversion(saved, dist.get_world_size())
    assert engine.load_universal_checkpoint() == universal, "see deepspeed_checkpoint_config"
    if universal:
        _on_rank_0(lambda: convert_to_universal(directory))
    engine.load_checkpoint(
        str(directory),
        tag=UNIVERSAL if universal else STATE,
        load_module_strict=saved.lora_rank == 0,
    )
    if universal:
        repair_optimizer(engine.optimizer.optimizer, directory / UNIVERSAL)
    if saved.world_size == dist.get_world_size():
        _load_random_state(directory / RANDOM)
    return saved


def _save_random_state(directory: Path) -> None:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(state, _random_state_file(directory))


def _load_random_state(directory: Path) -> None:
    state = torch.load(_random_state_file(directory), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _random_state_file(directory: Path) -> Path:
    return directory / f"rank_{dist.get_rank()}.pt"


def _check_parameters(engine: Any, directory: Path) -> None:
    saved = read_parameters(directory)
    here = _parameter_shapes(engine)
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"{directory / FACTS}: the parameter {name} has shape {saved.get(name)} in the "
                f"checkpoint and {here.get(name)} in the model: set model.name_or_path to the "
                f"model that was trained ({read_facts(directory).base_model})"
            )


def _parameter_shapes(engine: Any) -> dict[str, list[int]]:
    # Under ZeRO-3 a partitioned parameter has shape (0,); its true one is in ds_shape.
    return {
        name: list(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


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
