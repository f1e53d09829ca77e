"""DriverState: what the driver needs to go on where it stopped; a part of each checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from real_ray.config import Config
from real_ray.errors import CheckpointError
from real_ray.ledger import LedgerState
from real_ray.types import RolloutTicket, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    """A group that was complete and not yet trained on. On disk ``group.ref`` is None."""

    number: int  # of its draw
    accepted: bool  # it has its place in a step, and is not filtered any more
    group: RolloutTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """The driver between two steps. What is neither closed nor buffered is drawn again."""

    policy_version: int
    prompts: str  # fingerprint of the training prompts and their order
    prompts_per_step: int
    sampling: Sampling  # of the buffered groups
    reward_function: str  # that scored them
    ledger: LedgerState
    num_resampled: int  # groups filtered for the step that fills up now
    buffered: tuple[BufferedGroup, ...]  # in the order of their numbers


_ADAPTER = TypeAdapter(DriverState)


def check_fits_data(state: DriverState, config: Config, *, prompts: str) -> None:
    """Check that a run which goes on from a checkpoint counts its prompts as the one before.

    Args:
        prompts: `PromptCursor.fingerprint` of the run.

    Raises:
        CheckpointError: it has other prompts, or steps of another size in the same epochs.
    """
    saved = f"the checkpoint of policy version {state.policy_version} was saved with"
    if state.prompts != prompts:
        raise CheckpointError(
            f"{saved} other training prompts than data.train = {config.data.train} gives now: "
            "rows, their order, the path as it is written, the chat template, data.shuffle or "
            "run.seed changed. Restore them, or start a new run with --checkpoint.resume never and "
            "another --run.name"
        )
    now = config.learner.prompts_per_step
    if config.num_epochs is not None and now != state.prompts_per_step:
        raise CheckpointError(
            f"{saved} learner.prompts_per_step = {state.prompts_per_step}, and it is {now} now: "
            "steps of two sizes do not add up to run.num_epochs. Set it back, or give the run a "
            "length in run.num_steps and no run.num_epochs"
        )


class SavedGroups:
    """Buffered groups of a checkpoint, each until its number is drawn again.

    Args:
        state: of the checkpoint; None: there is none.
        sampling: as it is now.
        tell: hears of groups that are not taken.
    """

    def __init__(
        self,
        state: DriverState | None,
        config: Config,
        *,
        sampling: Sampling,
        tell: Callable[[str], None],
    ) -> None:
        self._groups = {b.number: b for b in state.buffered} if state else {}
        self._made_as_now = state is not None and (
            (state.sampling, state.reward_function) == (sampling, config.reward.function)
        )
        self._max_staleness = config.rollout.max_staleness
        self._tell = tell

    def left(self) -> Collection[BufferedGroup]:
        """Those that have not been drawn again yet."""
        return self._groups.values()

    def take(self, number: int, *, in_step: int) -> BufferedGroup | None:
        """The group of this number, if there is one that may train in this step.

        Scores compare log-probs of the learner with those at the temperature of the sampling, and
        completions may be longer than the learner now has room for.
        """
        saved = self._groups.pop(number, None)
        if saved is None:
            return None
        staleness = in_step - 1 - saved.group.sampled.oldest_version
        if self._made_as_now and staleness <= self._max_staleness:
            return saved
        self._tell(
            f"group {saved.group.uid} of the checkpoint was sampled or scored with other settings "
            "than now, or is too old for rollout.max_staleness"
        )
        return None


def to_json(state: DriverState) -> str:
    """The state as text, without the references to groups."""
    buffered = tuple(
        dataclasses.replace(
            b,
            group=dataclasses.replace(
                b.group, ref=None, sampled=dataclasses.replace(b.group.sampled, ref=None)
            ),
        )
        for b in state.buffered
    )
    return _ADAPTER.dump_json(dataclasses.replace(state, buffered=buffered), indent=1).decode()


def from_json(text: str, *, place: str) -> DriverState:
    """Read what `to_json` wrote.

    Args:
        place: the file, for errors.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{place}: not the driver's state of a checkpoint: {where}: {first['msg']}. Use an "
            "earlier checkpoint"
        ) from error
