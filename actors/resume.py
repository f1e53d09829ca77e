"""Where a run begins: with the model as given, or where a checkpoint leaves off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoint_files import (
    DRIVER,
    FACTS,
    CheckpointFacts,
    check_fits,
    newest_complete,
    read_facts,
)
from real_ray.checkpoint import check_same_prompts, from_json
from real_ray.config import Config
from real_ray.data import PromptCursor
from real_ray.errors import CheckpointError, ConfigError, UserError
from real_ray.tracking.status import read_status
from real_ray.types import Prompt

_ANEW = "--checkpoint.resume never --run.overwrite true"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins."""

    checkpoint: Path | None = None  # None: the model as given
    step: int = 0  # that the run begins after; the policy version of the checkpoint
    continues: bool = False  # the run of its directory, whose records stay
    is_finished: bool = False  # there is nothing left to do

    def describe(self, config: Config) -> str:
        """One line for the user."""
        name, place = config.run.name, config.run.directory
        if self.is_finished:
            return (
                f"run {name} is finished; its files are in {place}. To train on, raise "
                f"run.num_steps or run.num_epochs; to start anew: {_ANEW}"
            )
        if self.continues:
            return (
                f"continuing run {name} from step {self.step} ({self.checkpoint}); to start anew: "
                f"{_ANEW}"
            )
        origin = f", from step {self.step} ({self.checkpoint})" if self.checkpoint else ""
        return f"run {name} in {place}{origin}"


def find_start(config: Config, train: Sequence[Prompt]) -> Start:
    """Decide where a run begins, as `checkpoint.resume` says; change nothing.

    Args:
        config: with `run.num_steps` counted.
        train: its training prompts.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or does not fit the run.
        ConfigError: it leaves nothing to do, or newer ones of the run are in the way.
    """
    resume, own = config.checkpoint.resume, config.run.directory.resolve()
    if resume == "never":
        return Start()
    if resume == "auto":
        checkpoint = newest_complete(own)
        if _is_finished(config) and (checkpoint or not config.run.overwrite):
            return Start(is_finished=True)
        if checkpoint is None:
            _refuse_damaged(own)
            return Start()
    else:
        checkpoint = _given(Path(resume).expanduser().resolve())
    step = check_fits(checkpoint, _facts(config)).policy_version
    _check_prompts(checkpoint, config, train)
    continues = checkpoint.is_relative_to(own)
    newest = newest_complete(own)
    if continues and newest != checkpoint:
        raise ConfigError(
            f"checkpoint.resume: {own} has a newer checkpoint than {checkpoint.name}, {newest}, "
            "which --checkpoint.resume auto would go on from later. Take another --run.name to "
            "branch off, or remove the newer ones"
        )
    if not continues and step >= config.num_steps:
        raise ConfigError(
            f"checkpoint.resume: {checkpoint} is of step {step}, and the run ends after step "
            f"{config.num_steps}. Raise run.num_steps or run.num_epochs, which count the steps "
            "before the checkpoint too"
        )
    return Start(checkpoint=checkpoint, step=step, continues=continues)


def _is_finished(config: Config) -> bool:
    try:
        status = read_status(config.run.directory / "status.json")
    except (OSError, UserError):
        return False
    return status.state == "finished" and config.num_steps <= status.num_steps


def _refuse_damaged(run_directory: Path) -> None:
    """A run with checkpoints is not to be replaced because none of them can be read."""
    damaged = sorted((run_directory / "checkpoints").glob("step_*"))
    if damaged:
        raise CheckpointError(
            f"{run_directory} has checkpoints, the newest is {damaged[-1].name}, but none that "
            f"this real-ray can read. Restore one, or start anew with {_ANEW}"
        )


def _given(path: Path) -> Path:
    """The checkpoint that a path of the user means.

    Raises:
        CheckpointError: it is none, and no run directory with a complete one.
    """
    if (path / FACTS).is_file() or not (path / "checkpoints").is_dir():
        try:
            read_facts(path)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint.resume: {error}") from error
        return path
    newest = newest_complete(path)
    if newest is None:
        raise CheckpointError(
            f"checkpoint.resume: the run {path} has no complete checkpoint. Give another one, or "
            "use --checkpoint.resume never"
        )
    return newest


def _facts(config: Config) -> CheckpointFacts:
    """What the learner of this run must have in common with a checkpoint."""
    learner = config.learner
    return CheckpointFacts(
        policy_version=0,
        world_size=learner.num_ranks,
        zero_stage=learner.zero_stage,
        dtype=learner.dtype,
        base_model=config.model.name_or_path,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=learner.lora_rank,
        lora_alpha=learner.lora_alpha,
        lora_target_modules=tuple(learner.lora_target_modules),
    )


def _check_prompts(checkpoint: Path, config: Config, train: Sequence[Prompt]) -> None:
    file = checkpoint / DRIVER
    state = from_json(file.read_text(encoding="utf-8"), place=str(file))
    cursor = PromptCursor(train, seed=config.run.seed, shuffle=config.data.shuffle)
    check_same_prompts(state, cursor.fingerprint(), source=config.data.train)
