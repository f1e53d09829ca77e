"""GroupBuffer: which groups are in the pipeline, in which state, in which order they train.

A group needs a slot to enter (`admit`) and keeps it until it was trained on AND the resulting
weights are in the generators (`release`), or until it leaves for another reason (`drop`, or
filtered). Groups train in the order of admission. Both together bound staleness: a group that is
admitted while version v is in the generators has at most ``num_slots - 1`` groups before it, so
with ``num_slots <= (max_staleness + 1) * groups_per_step`` it is trained on at the latest in step
v + max_staleness + 1, by version v + max_staleness. That holds whatever is slow or fails, and it
makes the sequence of batches independent of timing.

Groups are decided on in the same order: `keeps` may filter one, for at most ``max_resampled``
groups a step. A group that is complete before an older one waits for that decision.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from real_ray.errors import GroupError, StalenessError
from real_ray.types import RolloutTicket, check_whole_group


class GroupState(Enum):
    """Where a group is. A group has exactly one state while it holds a slot."""

    GENERATING = "generating"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"


class GroupBuffer:
    """Slots, states and order of the groups between admission and release.

    Who waits here: the admission loop in `slot`, the training loop in `take`. Who wakes them:
    `push`, `drop`, `release`, `end` and `stop`.

    Args:
        groups_per_step: size of a batch.
        num_groups: groups that are still to be trained on; no more are admitted than that.
        keeps: whether a group teaches something; None: all are kept.
        max_resampled: groups that may be filtered for one step.
        num_resampled: groups that were filtered already for the first step.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        groups_per_step: int,
        num_groups: int,
        num_generations: int,
        max_staleness: int,
        keeps: Callable[[RolloutTicket], bool] | None = None,
        max_resampled: int = 0,
        num_resampled: int = 0,
    ) -> None:
        self._num_slots = num_slots
        self._groups_per_step = groups_per_step
        self._num_groups = num_groups
        self._num_generations = num_generations
        self._max_staleness = max_staleness
        self._keeps = keeps
        self._max_resampled = max_resampled
        self.num_resampled = num_resampled  # for the step that fills up now
        self._states: dict[str, GroupState] = {}
        self._counts: Counter[GroupState] = Counter()
        self._ready: dict[str, RolloutTicket] = {}  # complete, with no decision yet
        self._undecided: deque[str] = deque()  # in the order of admission
        self._decided_before: set[str] = set()  # accepted by the run that is continued
        self._accepted: deque[RolloutTicket] = deque()  # in the order of admission
        self._num_trained = 0
        self._ended = self._stopped = False
        self._slot_free = asyncio.Event()
        self._batch_full = asyncio.Event()

    async def slot(self) -> None:
        """Wait until another group may be admitted."""
        while not self._has_slot:
            self._slot_free.clear()
            await self._slot_free.wait()

    def admit(self, uid: str) -> None:
        """Give a slot to a group, which goes to the end of the order."""
        if uid in self._states:
            raise GroupError(f"group {uid} is already in the pipeline")
        assert self._has_slot, "admit follows slot"
        self._states[uid] = GroupState.GENERATING
        self._counts[GroupState.GENERATING] += 1
        self._undecided.append(uid)

    def restore(self, group: RolloutTicket, *, accepted: bool) -> list[RolloutTicket]:
        """Admit a group that is complete already, as from a checkpoint.

        Args:
            accepted: it was decided on before, so it is not filtered any more.

        Returns:
            As `push`.
        """
        if accepted:
            self._decided_before.add(group.uid)
        self.admit(group.uid)
        self.generated(group.uid)
        return self.push(group)

    def generated(self, uid: str) -> None:
        """The group has been sampled and goes to the reward workers."""
        self._move(uid, GroupState.GENERATING, GroupState.SCORING)

    def lost(self, uid: str) -> None:
        """Its completions are gone before they were scored: it is sampled again."""
        self._move(uid, GroupState.SCORING, GroupState.GENERATING)

    def push(self, group: RolloutTicket) -> list[RolloutTicket]:
        """The group has been scored and can be trained on.

        Returns:
            Groups, this one or later ones, that were filtered now and have left the pipeline.

        Raises:
            GroupError: not one whole group, or not a group that is being scored.
        """
        check_whole_group(group.uid, range(len(group.rewards)), self._num_generations)
        check_whole_group(group.uid, range(group.sampled.num_members), self._num_generations)
        self._move(group.uid, GroupState.SCORING, GroupState.READY)
        self._ready[group.uid] = group
        return self._decide()

    def drop(self, uid: str) -> list[RolloutTicket]:
        """The group failed or was given up: free its slot for another one.

        Returns:
            As `push`.
        """
        state = self._states.get(uid)
        if state not in (GroupState.GENERATING, GroupState.SCORING):
            raise GroupError(f"group {uid} cannot be dropped: it is {state and state.value}")
        self._remove(uid)
        return self._decide()

    def end(self) -> None:
        """No more groups will be admitted: the last batch may be smaller."""
        self._ended = True
        self._wake()

    def stop(self) -> None:
        """Nothing more will be taken: groups stay for a checkpoint."""
        self._stopped = True
        self._wake()

    async def take(self, *, policy_version: int, drop_last: bool = False) -> list[RolloutTicket]:
        """Wait for the oldest groups that make a batch, and hand them over for training.

        Args:
            policy_version: version of the policy that is about to be trained.
            drop_last: leave a last batch that is too small in the buffer.

        Returns:
            ``groups_per_step`` groups; fewer, or none, after `end`; none after `stop`.

        Raises:
            StalenessError: a group holds tokens more than `max_staleness` versions old.
        """
        while not (self._has_batch or self._stopped):
            self._batch_full.clear()
            await self._batch_full.wait()
        if self._stopped:
            return []
        size = min(len(self._accepted), self._groups_per_step)
        if drop_last and size < self._groups_per_step:
            return []
        batch = [self._accepted.popleft() for _ in range(size)]
        for group in batch:
            self._move(group.uid, GroupState.READY, GroupState.TRAINING)
            staleness = policy_version - group.sampled.oldest_version
            if not 0 <= staleness <= self._max_staleness:
                raise StalenessError(
                    f"group {group.uid} has tokens of policy version "
                    f"{group.sampled.oldest_version} while version {policy_version} trains: "
                    f"staleness {staleness}, allowed 0 to {self._max_staleness}"
                )
        return batch

    def release(self, groups: Sequence[RolloutTicket]) -> None:
        """The groups were trained on and the new weights are in the generators."""
        for group in groups:
            if self._states.get(group.uid) is not GroupState.TRAINING:
                raise GroupError(f"group {group.uid} was not taken for training")
            self._remove(group.uid)
        self._num_trained += len(groups)
        self._wake()

    def counts(self) -> dict[GroupState, int]:
        """Groups in each state."""
        return {state: self._counts[state] for state in GroupState}

    def uids(self) -> Iterable[str]:
        """All groups in the pipeline, in the order of admission."""
        return self._states.keys()

    def complete_groups(self) -> list[tuple[RolloutTicket, bool]]:
        """Groups that wait for training, and whether each is accepted; these come first."""
        waiting = [(self._ready[uid], False) for uid in self._undecided if uid in self._ready]
        return [(group, True) for group in self._accepted] + waiting

    @property
    def _has_slot(self) -> bool:
        num_open = len(self._states)
        return num_open < self._num_slots and self._num_trained + num_open < self._num_groups

    @property
    def _has_batch(self) -> bool:
        return len(self._accepted) >= self._groups_per_step or (self._ended and not self._undecided)

    def _decide(self) -> list[RolloutTicket]:
        """Accept or filter complete groups, up to the oldest that is not complete."""
        filtered = []
        while self._undecided:
            uid = self._undecided[0]
            if uid in self._states and uid not in self._ready:
                break
            self._undecided.popleft()
            if uid not in self._states:  # dropped
                continue
            group = self._ready.pop(uid)
            if uid in self._decided_before:
                self._decided_before.remove(uid)
                self._accepted.append(group)
            elif self._filters(group):
                self.num_resampled += 1
                self._remove(uid)
                filtered.append(group)
            else:
                self._accepted.append(group)
                if len(self._accepted) % self._groups_per_step == 0:
                    self.num_resampled = 0  # the next group opens another step
        self._wake()
        return filtered

    def _filters(self, group: RolloutTicket) -> bool:
        return (
            self._keeps is not None
            and self.num_resampled < self._max_resampled
            and not self._keeps(group)
        )

    def _move(self, uid: str, source: GroupState, target: GroupState) -> None:
        state = self._states.get(uid)
        if state is not source:
            raise GroupError(
                f"group {uid} cannot become {target.value}: it is "
                f"{state.value if state else 'not in the pipeline'}, not {source.value}"
            )
        self._states[uid] = target
        self._counts[source] -= 1
        self._counts[target] += 1

    def _remove(self, uid: str) -> None:
        self._counts[self._states.pop(uid)] -= 1

    def _wake(self) -> None:
        if self._has_slot:
            self._slot_free.set()
        if self._has_batch or self._stopped:
            self._batch_full.set()
