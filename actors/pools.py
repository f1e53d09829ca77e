"""The roles of `real_ray.roles` over Ray actors."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.protocol import TrainedBatch
from actors.replies import replies, reply
from actors.requests import rank_work
from real_ray.checkpoint import DriverState, to_json
from real_ray.config import LearnerConfig, LossConfig
from real_ray.errors import ActorDiedError, GenerationError, LearnerError, RewardError
from real_ray.partial_metrics import PartialMetrics
from real_ray.types import Prompt, RolloutTicket, SampledTicket, Sampling, TrainResult


class RayGeneratorPool:
    """Sends each group to the generator with the fewest unfinished completions."""

    def __init__(self, generators: Sequence[Any], *, timeout_s: float) -> None:
        self._generators = list(generators)
        self._running = [0] * len(self._generators)
        self._timeout_s = timeout_s

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        index = min(range(len(self._running)), key=self._running.__getitem__)
        self._running[index] += sampling.n
        name = f"generator-{index}"
        late = GenerationError(
            f"group {prompt.uid}: {name} did not finish it within {self._timeout_s:g} s "
            "(rollout.timeout_s)"
        )
        ticket, group = (
            self._generators[index].generate.options(num_returns=2).remote(prompt, sampling)
        )
        try:
            meta = await reply(ticket, who=name, timeout_s=self._timeout_s, late=late)
        except BaseException:
            ray.cancel(ticket)  # or the engine would go on with what nobody waits for
            raise
        finally:
            self._running[index] -= sampling.n
        result: SampledTicket = dataclasses.replace(meta, ref=group)
        return result


class RayRewardPool:
    """Gives each group to an idle reward worker.

    One that dies is replaced, and so is one that still computes when its time is over or its caller
    was cancelled.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Any],
        *,
        num_workers: int,
        function: str,
        timeout_s: float,
    ) -> None:
        self._start_worker = start_worker
        self._function = function
        self.timeout_s = timeout_s
        self.workers = [start_worker(index) for index in range(num_workers)]
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for index in range(num_workers):
            self._idle.put_nowait(index)

    async def score(self, group: SampledTicket) -> RolloutTicket:
        index = await self._idle.get()
        try:
            return await self._score_on(index, group)
        finally:
            self._idle.put_nowait(index)

    async def _score_on(self, index: int, group: SampledTicket) -> RolloutTicket:
        where = f"reward function `{self._function}`, group {group.uid}"
        late = RewardError(f"{where}: not scored within {self.timeout_s:g} s (reward.timeout_s)")
        summary, scored = self.workers[index].score.options(num_returns=2).remote(group.ref)
        try:
            rewards, seconds = await reply(
                summary, who=f"reward-{index}", timeout_s=self.timeout_s, late=late
            )
        except asyncio.CancelledError:
            self._replace(index)
            raise
        except ActorDiedError as error:
            self._replace(index)
            raise RewardError(f"{where}: the worker's process died: {error}") from error
        except RewardError as error:
            if error is late:
                self._replace(index)
            raise
        return RolloutTicket(sampled=group, rewards=tuple(rewards), seconds=seconds, ref=scored)

    def _replace(self, index: int) -> None:
        ray.kill(self.workers[index])
        self.workers[index] = self._start_worker(index)


class RayLearnerGroup:
    """All ranks of the learner as one.

    Args:
        save_total_limit: `checkpoint.save_total_limit`.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        *,
        config: LearnerConfig,
        loss: LossConfig,
        save_total_limit: int | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self._save_total_limit = save_total_limit
        self._names = [f"learner-{rank}" for rank in range(len(self.ranks))]
        self._config = config
        self._loss = loss

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        work = rank_work(
            groups, learner=self._config, loss=self._loss, policy_version=policy_version
        )
        parts: list[TrainedBatch] = await self.call(
            "step",
            [
                # Ray hands the groups themselves to the rank: they never pass through here.
                rank.train.remote(its.request, *(groups[i].ref for i in its.groups))
                for rank, its in zip(self.ranks, work, strict=True)
            ],
        )
        return TrainResult(
            policy_version=policy_version,
            metrics={
                **PartialMetrics.merge(part.metrics for part in parts).values(),
                "policy/learning_rate": parts[0].learning_rate,
            },
            samples=tuple(sample for part in parts for sample in part.samples),
            warnings=parts[0].warnings,
        )

    async def save(self, directory: str) -> None:
        await self.call("save", [rank.save.remote(directory) for rank in self.ranks])

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        text = to_json(state)
        groups = [buffered.group.ref for buffered in state.buffered]  # rank 0 writes them
        await self.call(
            "checkpoint",
            [
                rank.save_checkpoint.remote(
                    directory,
                    text,
                    *(groups if index == 0 else ()),
                    save_total_limit=self._save_total_limit,
                )
                for index, rank in enumerate(self.ranks)
            ],
        )

    async def call(self, what: str, refs: Sequence[Any]) -> list[Any]:
        """Replies of all ranks to a call that they do together."""
        late = LearnerError(
            f"the learner did not finish its {what} within {self._config.timeout_s:g} s "
            "(learner.timeout_s)"
        )
        return await replies(refs, who=self._names, timeout_s=self._config.timeout_s, late=late)
