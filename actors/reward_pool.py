"""RayRewardPool: reward workers, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray

from actors.killing import kill
from actors.replies import reply
from real_ray.activity import Activity
from real_ray.errors import ActorDiedError, GroupLostError, RewardError
from real_ray.tracking import Tracker
from real_ray.types import RolloutTicket, SampledTicket


class RayRewardPool:
    """Gives each group to the reward worker that is idle for the longest.

    One that dies is replaced, and so is one that still computes when its time is over or its caller
    was cancelled: when it gets its next group, so that none is started for nobody. A group that is
    tried again goes to another worker, if there are several.

    Args:
        keeps_copies: keep scored groups in Ray's store on this machine too, so that they do not go
            with the node of their worker.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Any],
        *,
        num_workers: int,
        function: str,
        timeout_s: float,
        activity: Activity,
        tracker: Tracker,
        keeps_copies: bool = False,
    ) -> None:
        self._start_worker = start_worker
        self._function = function
        self.timeout_s = timeout_s
        self._activity = activity
        self._tracker = tracker
        self._keeps_copies = keeps_copies
        self._lost_at: dict[int, float] = {}  # by worker
        self.workers: list[Any] = [start_worker(index) for index in range(num_workers)]
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for index in range(num_workers):
            self._idle.put_nowait(index)

    async def score(self, group: SampledTicket) -> RolloutTicket:
        index = await self._idle.get()
        self._tell()
        try:
            return await self._score_on(index, group)
        finally:
            self._idle.put_nowait(index)
            self._tell()

    def stop(self) -> None:
        """End all workers."""
        for index in range(len(self.workers)):
            self._end(index)

    async def _score_on(self, index: int, group: SampledTicket) -> RolloutTicket:
        where = f"reward function `{self._function}`, group {group.uid}"
        late = RewardError(f"{where}: not scored within {self.timeout_s:g} s (reward.timeout_s)")
        if self.workers[index] is None:
            self.workers[index] = self._start_worker(index)
        summary, scored = self.workers[index].score.options(num_returns=2).remote(group.ref)
        try:
            rewards, seconds = await reply(
                summary, who=f"reward-{index}", timeout_s=self.timeout_s, late=late
            )
        except asyncio.CancelledError:
            self._end(index)
            raise
        except ActorDiedError as error:
            self._lose(index, str(error))
            raise RewardError(f"{where}: the worker's process died: {error}") from error
        except RewardError as error:
            if error is late:
                self._lose(index, str(error))
            raise
        if self._keeps_copies:
            here, _ = await asyncio.to_thread(ray.wait, [scored], timeout=self.timeout_s)
            if not here:
                raise GroupLostError(f"{where}: it did not come from the node of its worker")
        if index in self._lost_at:
            seconds_lost = time.monotonic() - self._lost_at.pop(index)
            self._tracker.event(
                "reward worker healed", f"reward-{index}, after {seconds_lost:.1f} s"
            )
        return RolloutTicket(sampled=group, rewards=tuple(rewards), seconds=seconds, ref=scored)

    def _lose(self, index: int, why: str) -> None:
        self._tracker.event("reward worker lost", f"reward-{index}: {why}")
        self._lost_at.setdefault(index, time.monotonic())
        self._end(index)

    def _end(self, index: int) -> None:
        if self.workers[index] is not None:
            kill(self.workers[index])
            self.workers[index] = None

    def _tell(self) -> None:
        num_busy = len(self.workers) - self._idle.qsize()
        if num_busy:
            self._activity.set("rewards", f"{num_busy} of {len(self.workers)} workers score")
        else:
            self._activity.remove("rewards")
