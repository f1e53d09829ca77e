"""GroupBuffer: which groups are in the pipeline, in which state, in which order they train.

A group needs a slot to enter (`admit`) and keeps it until it was trained on AND the resulting
weights are in the generators (`release`), or until it failed (`fail`). Batches are taken in the
order of admission. Both together bound staleness: with ``(max_staleness + 1) * prompts_per_step``
slots, the group that trains in step n was admitted when step n - max_staleness - 1 had already
reached the generators, so no token of it is more than ``max_staleness`` versions old. The order
also makes the sequence of batches independent of timing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
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

    Who waits here: the admission loop in `slot`, the training loop in `take`.
    Who wakes them: `push`, `fail` and `release`.

    Args:
        num_groups: groups that the whole run trains on; no more slots are given out than that.
    """

    def __init__(
        self, *, num_slots: int, num_groups: int, num_generations: int, max_staleness: int
    ) -> None:
        self._num_slots = num_slots
        self._num_groups = num_groups
        self._num_generations = num_generations
        self._max_staleness = max_staleness
        self._states: dict[str, GroupState] = {}  # in the order of admission
        self._ready: dict[str, RolloutTicket] = {}
        self._changed = asyncio.Condition()
        self.num_trained = 0
        self.num_failed = 0

    async def slot(self) -> None:
        """Wait until another group may be admitted."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    len(self._states) < self._num_slots
                    and self.num_trained + len(self._states) < self._num_groups
                )
            )

    def admit(self, uid: str) -> None:
        """Give a slot to a group, which goes to the end of the order."""
        if uid in self._states:
            raise GroupError(f"group {uid} is already in the pipeline")
        assert len(self._states) < self._num_slots, "admit follows slot"
        self._states[uid] = GroupState.GENERATING

    def generated(self, uid: str) -> None:
        """The group has been sampled and goes to the reward workers."""
        self._move(uid, GroupState.GENERATING, GroupState.SCORING)

    async def push(self, group: RolloutTicket) -> None:
        """The group has been scored and can be trained on.

        Raises:
            GroupError: not one whole group, or not a group that is being scored.
        """
        check_whole_group(group.uid, range(len(group.rewards)), self._num_generations)
        check_whole_group(group.uid, range(group.sampled.num_members), self._num_generations)
        self._move(group.uid, GroupState.SCORING, GroupState.READY)
        self._ready[group.uid] = group
        await self._notify()

    async def fail(self, uid: str) -> None:
        """The group could not be generated or scored: free its slot for another one."""
        state = self._states.get(uid)
        if state not in (GroupState.GENERATING, GroupState.SCORING):
            raise GroupError(f"group {uid} cannot fail: it is {state and state.value}")
        del self._states[uid]
        self.num_failed += 1
        await self._notify()

    async def take(self, count: int, *, policy_version: int) -> list[RolloutTicket]:
        """Wait for the ``count`` oldest groups and hand them over for training.

        Args:
            policy_version: version of the policy that is about to be trained.

        Raises:
            StalenessError: a group holds tokens more than `max_staleness` versions old.
        """

        def oldest() -> list[str]:
            waiting = (u for u, s in self._states.items() if s is not GroupState.TRAINING)
            return [uid for uid, _ in zip(waiting, range(count), strict=False)]

        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    len(oldest()) == count
                    and all(self._states[uid] is GroupState.READY for uid in oldest())
                )
            )
        batch = [self._ready.pop(uid) for uid in oldest()]
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

    async def release(self, groups: Sequence[RolloutTicket]) -> None:
        """The groups were trained on and the new weights are in the generators."""
        for group in groups:
            if self._states.get(group.uid) is not GroupState.TRAINING:
                raise GroupError(f"group {group.uid} was not taken for training")
            del self._states[group.uid]
        self.num_trained += len(groups)
        await self._notify()

    def counts(self) -> dict[GroupState, int]:
        """Groups in each state."""
        counts = Counter(self._states.values())
        return {state: counts[state] for state in GroupState}

    def _move(self, uid: str, source: GroupState, target: GroupState) -> None:
        state = self._states.get(uid)
        if state is not source:
            raise GroupError(
                f"group {uid} cannot become {target.value}: it is "
                f"{state.value if state else 'not in the pipeline'}, not {source.value}"
            )
        self._states[uid] = target

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
