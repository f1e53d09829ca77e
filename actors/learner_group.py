"""RayLearnerGroup: all ranks of the learner as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from actors.protocol import SyncRendezvous, TrainedBatch
from actors.ray_generator import RayGenerator
from actors.replies import replies
from actors.requests import rank_work
from real_ray.checkpoint import DriverState, to_json
from real_ray.config import LearnerConfig, LossConfig
from real_ray.errors import ActorDiedError, GroupLostError, LearnerLostError
from real_ray.partial_metrics import PartialMetrics
from real_ray.roles import Generator
from real_ray.types import FloatArray, IntArray, RolloutTicket, TrainResult
from real_ray.weights import SentWeights


class RayLearnerGroup:
    """`LearnerGroup` and `WeightSender` over `LearnerActor`s.

    Args:
        policy_version: of their weights.
        sync_timeout_s: `sync.timeout_s`.
        rendezvous: where learner and so many generators can form a weight-transfer group.
        save_total_limit: `checkpoint.save_total_limit`.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        *,
        config: LearnerConfig,
        loss: LossConfig,
        sync_timeout_s: float = 300.0,
        rendezvous: Callable[[int], Awaitable[SyncRendezvous]],
        policy_version: int = 0,
        save_total_limit: int | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self._names = [f"learner-{rank}" for rank in range(len(self.ranks))]
        self._config = config
        self._loss = loss
        # Each of the steps within has its own deadline, which ends before.
        self._sync_timeout_s = max(config.timeout_s, 4 * sync_timeout_s)
        self._rendezvous = rendezvous
        self._policy_version = policy_version
        self._save_total_limit = save_total_limit
        self._connected: list[Any] = []  # actors of the generators in the transfer group
        self._weights = asyncio.Lock()  # held by whoever changes them, or needs them as they are

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        work = rank_work(
            groups, learner=self._config, loss=self._loss, policy_version=policy_version
        )
        async with self._weights:
            self._policy_version = policy_version
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

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[int]:
        async with self._weights:
            yield self._policy_version

    async def send_weights(
        self, receivers: Sequence[Generator], *, policy_version: int
    ) -> SentWeights:
        what = f"sync of version {policy_version}"
        handles = {r.name: r.actor for r in receivers if isinstance(r, RayGenerator)}
        actors = list(handles.values())
        if actors != self._connected:
            self._connected = []
            try:
                rendezvous = await self._rendezvous(len(handles))
            except ActorDiedError as error:  # the rank that opens it
                raise LearnerLostError(f"{what}: {error}") from error
            await self.call(
                what,
                [rank.connect.remote(rendezvous, handles) for rank in self.ranks],
                timeout_s=self._sync_timeout_s,
            )
        self._connected = []  # a transfer that fails leaves no usable group
        sent: list[SentWeights] = await self.call(
            what,
            [rank.send_weights.remote(policy_version) for rank in self.ranks],
            timeout_s=self._sync_timeout_s,
        )
        self._connected = actors
        return sent[0]

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        answers: list[FloatArray] = await self.call(
            "probe", [rank.probe.remote(token_ids) for rank in self.ranks]
        )
        return answers[0]

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

    async def call(
        self, what: str, refs: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[Any]:
        """Replies of all ranks to a call that they do together.

        Raises:
            LearnerLostError: a rank died, failed without a reason that we know, or was too late.
        """
        timeout_s = timeout_s or self._config.timeout_s
        late = LearnerLostError(
            f"the learner did not finish its {what} within {timeout_s:g} s (learner.timeout_s)"
        )
        try:
            return await replies(refs, who=self._names, timeout_s=timeout_s, late=late)
        except (ActorDiedError, GroupLostError) as error:
            raise LearnerLostError(f"{what}: {error}") from error
