"""Broadcaster: brings the learner's weights into the generators, and verifies that they arrived.

One sync::

    pause ──▶ send to all at once ──▶ compare what they hold ──▶ resume ──▶ compare log-probs
      │               │                          │                                  │
      ▼               ▼                          └────────── wrong ─────────────────┤
    no answer:     broken: lost, the                                                ▼
    lost           others get it anew                          sent once more, then lost

Generators that are lost are replaced (`HealingPool`). Those that start between two steps get the
weights at once (`bring_in`), unless the learner is making new ones, which they get then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from real_ray.activity import Activity
from real_ray.config import SyncConfig
from real_ray.errors import RealRayError, SyncError
from real_ray.healing_pool import HealingPool
from real_ray.members import Member, MemberState
from real_ray.roles import Generator, WeightSender
from real_ray.tracking import Tracker
from real_ray.types import SyncReport
from real_ray.weights import Probe, SentWeights, most_common, what_is_wrong

Answer = TypeVar("Answer")
_TIMES = 2  # that weights are sent before it counts as a failure


class Broadcaster:
    """`WeightBroadcaster` to the generators of a pool.

    Args:
        probe: sequence whose log-probs are compared after each sync; None: no comparison.
    """

    def __init__(
        self,
        pool: HealingPool,
        learner: WeightSender,
        *,
        config: SyncConfig,
        probe: Probe | None,
        tracker: Tracker,
        activity: Activity,
    ) -> None:
        self._pool = pool
        self._learner = learner
        self._config = config
        self._probe = probe
        self._tracker = tracker
        self._activity = activity
        self._policy_version: int | None = None  # in the generators
        self._engine_checksum = ""  # of that version, as a generator has it that is right
        self._one_at_a_time = asyncio.Lock()
        self._broadcast_done = asyncio.Event()

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        async with self._one_at_a_time:
            self._policy_version, self._engine_checksum = policy_version, ""
            report = await self._sync(self._pool.members(), policy_version)
        self._broadcast_done.set()
        self._broadcast_done = asyncio.Event()
        return report

    async def bring_in(self) -> None:
        while True:
            next_broadcast = asyncio.ensure_future(self._broadcast_done.wait())
            starved = asyncio.ensure_future(self._pool.starved())
            try:
                await self._pool.newcomers()
                if not await self._sync_newcomers():
                    ends = {next_broadcast, starved}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                next_broadcast.cancel()
                starved.cancel()

    async def _sync_newcomers(self) -> bool:
        """False: all generators will get newer weights, which the learner has by now.

        Where none is left that samples, these do not wait for that: whatever the next sync waits
        for, an evaluation say, may wait for them.
        """
        async with self._one_at_a_time:
            if self._policy_version is None:
                return False
            async with self._learner.holding() as version:
                if version != self._policy_version and self._pool.is_sampling:
                    return False
                waiting = [m for m in self._pool.members() if m.state is MemberState.WAITING]
                if waiting:
                    self._policy_version = version
                    await self._sync(waiting, version)
                return True

    async def _sync(self, members: Sequence[Member], policy_version: int) -> SyncReport:
        """Send until each of these generators holds the weights, or is lost."""
        clock = asyncio.get_running_loop().time
        began, pause, num_tries = clock(), 0.0, 0
        self._activity.set("sync", f"version {policy_version} to {len(members)} generators")
        sent: SentWeights | None = None
        differences: dict[Member, float] = {}  # of those that hold the weights
        mistake: SyncError | None = None
        left = list(members)
        while left:
            num_tries += 1
            with self._pool.syncing(left):
                paused = clock()
                left = list(await self._ask(left, lambda generator: generator.pause()))
                left, sent = await self._send(left, policy_version)
                wrong, checksums = await self._compare_weights(left, sent)
                # The others stay paused until they have the right weights.
                right = [member for member in left if member not in wrong]
                right = list(await self._ask(right, lambda generator: generator.resume()))
                pause = max(pause, clock() - paused)
                now, too_far = await self._compare_logprobs(right)
                differences |= now
            for member in now:
                self._pool.admit(member)
                self._engine_checksum = self._engine_checksum or checksums.get(member, "")
            left = []
            for member, what in (wrong | too_far).items():
                mistake = SyncError(
                    f"weight sync of version {policy_version}: {member.name} has other weights "
                    f"than the learner: {what}",
                    (member.name,),
                )
                if num_tries < _TIMES:
                    self._tracker.event("sync repeated", f"{mistake}; it gets them again")
                    self._pool.interrupt(member)
                    left.append(member)
                else:
                    self._pool.fail(member, mistake)
        if mistake is not None and not self._pool.has_admitted:
            raise mistake  # it is no single generator's fault
        self._activity.set("sync", f"version {policy_version} is in {len(differences)} generators")
        return SyncReport(
            policy_version=policy_version,
            seconds=clock() - began,
            pause_seconds=pause,
            num_generators=len(differences),
            num_tensors=sent.num_tensors if sent else 0,
            num_bytes=sent.num_bytes if sent else 0,
            probe_difference=max(differences.values(), default=0.0),
            parts=dict(sent.seconds) if sent else {},
        )

    async def _send(
        self, members: Sequence[Member], policy_version: int
    ) -> tuple[list[Member], SentWeights | None]:
        """Send, without those that break it; return who is left, and what was sent to these."""
        left, num_unexplained = list(members), 0
        while left:
            try:
                sent = await self._learner.send_weights(
                    [member.generator for member in left], policy_version=policy_version
                )
                return left, sent
            except SyncError as error:
                lost = [m for m in left if m.name in error.generators or m.end.done()]
                num_unexplained += not lost
                if num_unexplained == _TIMES:
                    if not self._pool.has_admitted:
                        raise
                    lost = left  # others were right before: these may be to blame
                self._tracker.event("sync repeated", f"{error}; without those that are lost")
                for member in lost:
                    self._pool.fail(member, error)
                left = [member for member in left if member not in lost]
        return [], None

    async def _compare_weights(
        self, members: Sequence[Member], sent: SentWeights | None
    ) -> tuple[dict[Member, str], dict[Member, str]]:
        """Those with wrong weights, in words; checksums of the engines that make their own."""
        if sent is None:
            return {}, {}
        held = await self._ask(members, lambda generator: generator.held_weights())
        wrong = {m: what for m, weights in held.items() if (what := what_is_wrong(sent, weights))}
        checksums = {
            member: weights.engine_checksum
            for member, weights in held.items()
            if weights.engine_checksum and member not in wrong
        }
        # Those that are sent to again, or join later, are compared with those that were right. If
        # no checksum is that of the most all are suspect: better one transfer more than one wrong.
        expected = self._engine_checksum or most_common(checksums.values())
        unlike = [m for m, checksum in checksums.items() if checksum != expected]
        return wrong | dict.fromkeys(unlike, "weights unlike those of the other generators"), {
            member: checksum for member, checksum in checksums.items() if member not in unlike
        }

    async def _compare_logprobs(
        self, members: Sequence[Member]
    ) -> tuple[dict[Member, float], dict[Member, str]]:
        """Mean |difference| from the learner of those within the tolerance; the others in words."""
        if self._probe is None or not members:
            return dict.fromkeys(members, 0.0), {}
        token_ids, first = self._probe.token_ids, self._probe.num_prompt_tokens - 1
        reference, logprobs = await asyncio.gather(
            self._learner.logprobs(token_ids),
            self._ask(members, lambda generator: generator.logprobs(token_ids)),
        )
        differences = {
            member: float(np.abs(its - reference)[first:].mean())
            for member, its in logprobs.items()
        }
        most = self._config.probe_tolerance
        right = {m: d for m, d in differences.items() if d <= most}  # NaN is not
        return right, {
            member: f"log-probs of a fixed sequence differ by {difference:.3f} on average, "
            f"allowed {most:g} (sync.probe_tolerance): a tensor is wrong or stale, or the dtype of "
            "the generator is too coarse"
            for member, difference in differences.items()
            if member not in right
        }

    async def _ask(
        self, members: Sequence[Member], question: Callable[[Generator], Awaitable[Answer]]
    ) -> Mapping[Member, Answer]:
        """The answers of those that answer; the others are lost."""

        async def ask(member: Member) -> dict[Member, Answer]:
            answer = asyncio.ensure_future(question(member.generator))
            try:
                ends: set[asyncio.Future[Any]] = {answer, member.end}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                return {member: answer.result()} if answer.done() else {}
            except RealRayError as error:
                self._pool.fail(member, error)
                return {}
            finally:
                answer.cancel()

        answers: dict[Member, Answer] = {}
        for answer in await asyncio.gather(*(ask(member) for member in members)):
            answers |= answer
        return answers
