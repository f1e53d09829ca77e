"""Where a run begins: with the model as given, or where a checkpoint leaves off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoint_files import (
    DRIVER,
    CheckpointFacts,
    check_fits,
    newest_complete,
    resolve,
)
from real_ray.checkpoint import check_fits_data, from_json
from real_ray.config import Config, changed_settings, load_config
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
    changes: tuple[str, ...] = ()  # of settings, since the run began

    def describe(self, config: Config) -> str:
        """One line for the user."""
        name, place = config.run.name, config.run.directory
        if self.is_finished:
            return (
                f"run {name} is finished; its files are in {place}. To train on, raise "
                f"run.num_steps or run.num_epochs; to start anew: {_ANEW}"
            )
        if self.continues:
            return f"continuing run {name} {self.origin}; to start anew: {_ANEW}"
        return f"run {name} in {place}" + (f", {self.origin}" if self.checkpoint else "")

    @property
    def origin(self) -> str:
        """The checkpoint, and which settings are others since."""
        changes = f", with {'; '.join(self.changes)}" if self.changes else ""
        return f"from step {self.step} ({self.checkpoint}){changes}"


def find_start(config: Config, train: Sequence[Prompt]) -> Start:
    """Decide where a run begins, as `checkpoint.resume` says.

    Args:
        config: with `run.num_steps` counted.
        train: its training prompts.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or does not fit the run.
        ConfigError: it leaves nothing to do, newer ones of the run are in the way, or the run is
            finished and was another one.
    """
    if config.checkpoint.resume == "never":
        return Start()
    own, earlier = config.run.directory.resolve(), _earlier_config(config)
    given = _given(config)
    newest = newest_complete(own)
    if given is not None and given.is_relative_to(own):
        checkpoint = _resolve(given)
        if checkpoint != newest:
            raise ConfigError(
                f"checkpoint.resume: {own} has a newer checkpoint than {checkpoint.name}, "
                f"{newest}, which --checkpoint.resume auto would go on from later. Take another "
                "--run.name to branch off, or remove the newer ones"
            )
        return _at(checkpoint, config, train, earlier)
    if given is None or (earlier is not None and _given(earlier) == given):
        if _is_finished(config) and (newest or not config.run.overwrite):
            _refuse_another_run(config, earlier)
            return Start(is_finished=True)
        if newest is not None:
            return _at(newest, config, train, earlier)
        _refuse_damaged(own)
    if given is None:
        return Start()
    start = _at(_resolve(given), config, train, None)
    if start.step >= config.num_steps:
        raise ConfigError(
            f"checkpoint.resume: {start.checkpoint} is of step {start.step}, and the run ends "
            f"after step {config.num_steps}. Raise run.num_steps or run.num_epochs, which count "
            "the steps before the checkpoint too"
        )
    return start


def _at(checkpoint: Path, config: Config, train: Sequence[Prompt], earlier: Config | None) -> Start:
    """Begin at a checkpoint of this run or, without an earlier config, of another one."""
    facts = check_fits(checkpoint, _facts(config))
    _check_base_model(facts, config)
    _check_data(checkpoint, config, train)
    return Start(
        checkpoint=checkpoint,
        step=facts.policy_version,
        continues=checkpoint.is_relative_to(config.run.directory.resolve()),
        changes=tuple(changed_settings(earlier, config)) if earlier else (),
    )


def _given(config: Config) -> Path | None:
    """What `checkpoint.resume` names: a checkpoint, or a run directory."""
    resume = config.checkpoint.resume
    return None if resume in ("auto", "never") else Path(resume).expanduser().resolve()


def _resolve(path: Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.resume: {error}") from error


def _earlier_config(config: Config) -> Config | None:
    """The config that the run of this name has had."""
    try:
        return load_config(config.run.directory / "config.yaml")
    except UserError:
        return None


def _is_finished(config: Config) -> bool:
    try:
        status = read_status(config.run.directory / "status.json")
    except (OSError, UserError):
        return False
    return status.state == "finished" and config.num_steps <= status.num_steps


def _refuse_another_run(config: Config, earlier: Config | None) -> None:
    """Somebody who asks for another experiment is not to be told that it is done."""
    changes = changed_settings(earlier, config) if earlier else []
    if changes:
        raise ConfigError(
            f"run.name: run {config.run.name} in {config.run.directory} is finished, and was "
            f"another one: {'; '.join(changes)}. Choose another --run.name, or replace it with "
            f"{_ANEW}"
        )


def _refuse_damaged(run_directory: Path) -> None:
    """A run with checkpoints is not to be replaced because none of them can be read."""
    damaged = sorted((run_directory / "checkpoints").glob("step_*"))
    if damaged:
        raise CheckpointError(
            f"{run_directory} has checkpoints, the newest is {damaged[-1].name}, but none that "
            f"this real-ray can read. Restore one, or start anew with {_ANEW}"
        )


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


def _check_base_model(saved: CheckpointFacts, config: Config) -> None:
    """Refuse a base model that was not there before, where its weights count besides the trained
    ones: below an adapter, and as what the KL term holds on to."""
    before, now = saved.base_model, config.model.name_or_path
    counts = saved.lora_rank > 0 or config.loss.beta > 0
    if counts and before != now and Path(before).resolve() != Path(now).resolve():
        raise CheckpointError(
            f"the checkpoint of step {saved.policy_version} was trained on the model {before}, and "
            f"model.name_or_path is {now} now. Set it back; if that model has moved, leave a link "
            "where it was"
        )


def _check_data(checkpoint: Path, config: Config, train: Sequence[Prompt]) -> None:
    file = checkpoint / DRIVER
    state = from_json(file.read_text(encoding="utf-8"), place=str(file))
    cursor = PromptCursor(train, seed=config.run.seed, shuffle=config.data.shuffle)
    check_fits_data(state, config, prompts=cursor.fingerprint())
