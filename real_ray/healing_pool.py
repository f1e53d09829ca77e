"""HealingPool: generators that are replaced when they are lost, and that come and go at any time.

::

    starting ── engine is up ──▶ waiting ── weights are in ──▶ ready ── scaled down ──▶ leaving
       ▲                            ▲                            │                         │
       │ pause                      └──── wrong weights ─────────┤                         ▼
       └───── lost: died, failed, no token for `rollout.stall_s` ┘                       gone

A slot keeps one generator: it starts another one in the place of one that was lost. The groups of
a generator that is lost fail, so that they are tried again on another one. `Broadcaster` brings the
weights, and says which generators hold them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from real_ray.activity import Activity
from real_ray.config import RolloutConfig
from real_ray.errors import (
    ActorDiedError,
    GenerationError,
    GeneratorsLostError,
    RealRayError,
    UserError,
    first_error,
)
from real_ray.health import watch_health
from real_ray.members import Member, MemberState, Slot
from real_ray.roles import Generator
from real_ray.tracking import Tracker
from real_ray.types import Prompt, SampledTicket, Sampling

_SUSPICIOUS = 2  # generators lost with a group, after which it may be to blame
_LONGEST_PAUSE_S = 60.0


class _LostError(GenerationError):
    """A group was on a generator that was lost."""


class HealingPool:
    """`GeneratorPool` with as many generators as are wanted, as far as the cluster can hold them.

    Args:
        make: builds the generator of a slot: its index, and how often it was started before.
    """

    def __init__(
        self,
        make: Callable[[int, int], Generator],
        *,
        config: RolloutConfig,
        tracker: Tracker,
        activity: Activity,
    ) -> None:
        self._make = make
        self._config = config
        self._tracker = tracker
        self._activity = activity
        self._slots: dict[int, Slot] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._failed_first: set[int] = set()
        self._has_started = False  # any generator, ever
        self.has_admitted = False  # any generator, ever
        self._losses: Counter[str] = Counter()  # of generators, by the group that was on them
        self._one_suspect = asyncio.Lock()
        self._changed = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What the driver uses.

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        while True:
            is_suspect = self._losses[prompt.uid] >= _SUSPICIOUS
            try:
                # One of them may be what its generators die of: then only that one pays for it.
                async with self._one_suspect if is_suspect else contextlib.nullcontext():
                    ticket = await self._generate(prompt, sampling)
                del self._losses[prompt.uid]
                return ticket
            except _LostError as error:
                self._losses[prompt.uid] += 1
                if is_suspect:
                    raise GenerationError(str(error)) from error
                self._tracker.event("generation failed", f"{error}; it goes to another one")

    async def _generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        member = await self._least_loaded()
        member.num_running += sampling.n
        answer = asyncio.ensure_future(member.generator.generate(prompt, sampling))
        try:
            lost: set[asyncio.Future[Any]] = {member.end, member.interruption}
            await asyncio.wait(lost | {answer}, return_when=asyncio.FIRST_COMPLETED)
            # Tokens of weights that turn out to be wrong are not trained on.
            settled = asyncio.ensure_future(member.settled.wait())
            await asyncio.wait(lost | {settled}, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
            if not answer.done() or any(future.done() for future in lost):
                reason = member.end.exception() if member.end.done() else "it has wrong weights"
                raise _LostError(f"group {prompt.uid}: {member.name} was lost: {reason}")
            ticket = answer.result()
            member.num_groups += 1
            return ticket
        except ActorDiedError as error:
            self.fail(member, error)
            raise _LostError(f"group {prompt.uid}: {member.name} was lost: {error}") from error
        finally:
            answer.cancel()
            member.num_running -= sampling.n
            self._let_go(member)

    async def watch(self) -> None:
        await asyncio.wait({self._failure})
        self._failure.result()

    # What the broadcaster uses.

    def members(self) -> list[Member]:
        """Generators with a running engine, all of which a sync must reach."""
        return [
            slot.member
            for slot in self._slots.values()
            if slot.member is not None
            and slot.member.state is not MemberState.STARTING
            and not slot.member.end.done()
        ]

    async def newcomers(self) -> None:
        """Wait for a generator that has no weights yet."""
        await self._until(lambda: any(m.state is MemberState.WAITING for m in self.members()))

    async def starved(self) -> None:
        """Wait until no generator samples."""
        await self._until(lambda: not self.is_sampling)

    @property
    def is_sampling(self) -> bool:
        """Whether any generator takes groups or finishes some."""
        states = {member.state for member in self.members()}
        return bool(states & {MemberState.READY, MemberState.LEAVING})

    @contextlib.contextmanager
    def syncing(self, members: Sequence[Member]) -> Iterator[None]:
        """While their weights are replaced and verified they neither stall nor leave."""
        for member in members:
            member.settled.clear()
        try:
            yield
        finally:
            for member in members:
                member.settled.set()
                self._let_go(member)

    def admit(self, member: Member) -> None:
        """It holds the current weights: let it sample."""
        if member.state is not MemberState.WAITING or member.end.done():
            return
        member.state = MemberState.READY
        self.has_admitted = True
        slot = next((slot for slot in self._slots.values() if slot.member is member), None)
        if slot is not None and slot.lost_at is not None:
            seconds = asyncio.get_running_loop().time() - slot.lost_at
            self._tracker.event("generator healed", f"{member.name}, after {seconds:.1f} s")
            slot.lost_at = None
        self._tell()

    def interrupt(self, member: Member) -> None:
        """It has wrong weights: its groups are tried again elsewhere until it has right ones."""
        member.interruption.set_result(None)
        member.interruption = asyncio.get_running_loop().create_future()
        if member.state is MemberState.READY:
            member.state = MemberState.WAITING
        self._tell()

    def fail(self, member: Member, error: RealRayError) -> None:
        """It is lost: its groups are tried again elsewhere, and it is replaced."""
        if not member.end.done():
            member.end.set_exception(error)
            member.end.exception()  # that nobody may wait for it any more is no mistake
            self._tell()

    # What the fleet uses.

    async def run(self) -> None:
        """Keep the generators, until this is cancelled; then stop them all.

        Raises:
            UserError: the first start of a generator found bad input.
            RunError: no generator started, or there are too few (also raised by `watch`).
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for index in range(self._config.num_wanted):
                    self._open(index)
                self._tasks.create_task(self._guard())
        except asyncio.CancelledError:
            self._failure.cancel()
            raise
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            self._failure.set_exception(error)
            self._failure.exception()  # that nobody may watch is no mistake
            raise error from errors

    async def has_begun(self) -> None:
        """Wait until there are as many as a run begins with."""
        await self._until(lambda: self._num_up >= self._config.num_to_begin)

    def scale(self, num_generators: int) -> None:
        """Change how many generators are wanted.

        Raises:
            ConfigError: as `RolloutConfig.check_scale`.
        """
        self._config.check_scale(num_generators)
        if self._failure.done():
            return  # the run ends
        for index, slot in list(self._slots.items()):
            if slot.has_given_up:
                del self._slots[index]
        staying = [slot for slot in self._slots.values() if not slot.is_leaving]
        # Those that do least go first, of these the newest.
        staying.sort(key=lambda slot: (slot.member is None or not slot.member.is_up, slot.index))
        for slot in staying[num_generators:]:
            self._close(slot)
        free = (i for i in range(2 * num_generators + len(self._slots)) if i not in self._slots)
        for index in [next(free) for _ in range(num_generators - len(staying))]:
            self._open(index)
        self._tell()

    def counts(self) -> dict[str, int]:
        """Generators by what they can do, and how many are wanted."""
        states = Counter(slot.member.state for slot in self._slots.values() if slot.member)
        return {
            "wanted": sum(not slot.is_leaving for slot in self._slots.values()),
            **{state.value: states[state] for state in MemberState},
            "lost": sum(slot.member is None for slot in self._slots.values()),
        }

    # How a slot keeps its generator.

    def _open(self, index: int) -> None:
        assert self._tasks is not None, "run comes first"
        slot = self._slots[index] = Slot(index)
        self._tasks.create_task(self._keep(slot), name=f"generator-{index}")

    def _close(self, slot: Slot) -> None:
        slot.is_leaving = True
        if slot.member is not None:
            if slot.member.state is MemberState.READY:
                slot.member.state = MemberState.LEAVING
            self._let_go(slot.member)
        self._notify()

    def _let_go(self, member: Member) -> None:
        """End one that leaves once it has nothing to do."""
        slot = next((s for s in self._slots.values() if s.member is member), None)
        is_busy = member.num_running or member.in_sync or member.end.done()
        if slot is not None and slot.is_leaving and not is_busy:
            member.end.set_result(None)
            self._tell()

    async def _keep(self, slot: Slot) -> None:
        losses = 0  # in a row
        error: RealRayError | None = None
        while not slot.is_leaving:
            member = slot.member = Member(self._make(slot.index, slot.num_starts))
            slot.num_starts += 1
            self._tell()
            error = None
            try:
                await self._live(member)
            except RealRayError as caught:
                error = caught
                self.fail(member, caught)  # whoever waits for it hears of it
            finally:
                slot.member = None
                self._activity.remove(member.name)
                await member.generator.stop(at_once=error is not None)
            if error is not None and not slot.is_leaving:
                self._check_first_start(slot, error)
                losses = 1 if member.num_groups else losses + 1
                await self._wait_before_the_next(slot, losses, error, name=member.name)
                if slot.has_given_up:
                    return
        if self._slots.get(slot.index) is slot:
            del self._slots[slot.index]
        self._tracker.event(
            "generator left", f"generator-{slot.index}" + (f": {error}" if error else "")
        )
        self._tell()

    async def _live(self, member: Member) -> None:
        """From its start to its orderly end; raises what it was lost by."""
        begun = asyncio.ensure_future(member.generator.start())
        try:
            await asyncio.wait({begun, member.end}, return_when=asyncio.FIRST_COMPLETED)
            if member.end.done():
                member.end.result()
                return
            begun.result()
        finally:
            begun.cancel()
        self._has_started = True
        member.state = MemberState.WAITING
        self._tell()
        watching = asyncio.ensure_future(watch_health(member, self._config.stall_s, self._activity))
        try:
            await asyncio.wait({watching, member.end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        (member.end if member.end.done() else watching).result()

    def _check_first_start(self, slot: Slot, error: RealRayError) -> None:
        """What no generator gets over at its first start is not tried again."""
        if not self._has_started:
            self._failed_first.add(slot.index)
            if isinstance(error, UserError) or len(self._failed_first) >= len(self._slots):
                raise error

    async def _wait_before_the_next(
        self, slot: Slot, losses: int, error: RealRayError, *, name: str
    ) -> None:
        loop = asyncio.get_running_loop()
        slot.lost_at = slot.lost_at or loop.time()
        most = self._config.max_restarts
        if losses > most:
            slot.has_given_up = True
            self._tracker.event(
                "generator lost", f"{name}: {error}; given up after {most} further starts"
            )
            self._tell()
            if sum(not s.has_given_up for s in self._slots.values()) < self._config.num_to_go_on:
                raise GeneratorsLostError(
                    f"{name} was lost {losses} times in a row (rollout.max_restarts = {most}), "
                    f"which leaves fewer than {self._config.num_to_go_on} generators "
                    f"(rollout.min_generators). The last time: {error}"
                )
            return
        pause = min(_LONGEST_PAUSE_S, 2.0 ** (losses - 1))
        self._tracker.event(
            "generator lost",
            f"{name}: {error}; starting it again in {pause:g} s ({losses} of at most {most})",
        )
        self._activity.set(name, f"lost, starts again in {pause:g} s")
        await asyncio.sleep(pause)

    async def _guard(self) -> None:
        """End the run when there are too few for too long."""
        await self.has_begun()
        config, least = self._config, self._config.num_to_go_on
        while True:
            await self._until(lambda: self._num_up < least)
            try:
                async with asyncio.timeout(config.recovery_s):
                    await self._until(lambda: self._num_up >= least)
            except TimeoutError:
                raise GeneratorsLostError(
                    f"{self._num_up} generators for {config.recovery_s:g} s (rollout.recovery_s), "
                    f"and the run needs {least} (rollout.min_generators)"
                ) from None

    @property
    def _num_up(self) -> int:
        return sum(slot.member is not None and slot.member.is_up for slot in self._slots.values())

    async def _least_loaded(self) -> Member:
        def ready() -> Collection[Member]:
            return [m for m in self.members() if m.state is MemberState.READY]

        await self._until(lambda: bool(ready()))
        return min(ready(), key=lambda member: member.num_running)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _tell(self) -> None:
        for slot in self._slots.values():
            if slot.member is not None and slot.member.state is not MemberState.READY:
                self._activity.set(slot.member.name, slot.member.state.value)
        self._tracker.generators(self.counts())
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
