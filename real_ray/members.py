"""Generators of a pool, and the slots that keep them."""

from __future__ import annotations

import asyncio
from enum import Enum

from real_ray.roles import Generator


class MemberState(Enum):
    """What a generator can do."""

    STARTING = "starting"
    WAITING = "waiting for weights"
    READY = "ready"
    LEAVING = "leaving"  # finishes its groups and takes no more


class Member:
    """A generator in the pool."""

    def __init__(self, generator: Generator) -> None:
        loop = asyncio.get_running_loop()
        self.generator = generator
        self.state = MemberState.STARTING
        self.settled = asyncio.Event()  # its weights are known to be right, as far as they can be
        self.settled.set()
        self.num_running = 0  # completions
        self.num_groups = 0  # finished
        self.end: asyncio.Future[None] = loop.create_future()
        self.interruption: asyncio.Future[None] = loop.create_future()

    @property
    def name(self) -> str:
        return self.generator.name

    @property
    def in_sync(self) -> bool:
        """Whether its weights are changed or verified: it may stand still and is not stalled."""
        return not self.settled.is_set()

    @property
    def is_up(self) -> bool:
        """Whether its engine runs and has a use."""
        return self.state in (MemberState.WAITING, MemberState.READY) and not self.end.done()


class Slot:
    """Keeps one generator, and starts another one in the place of one that was lost."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.member: Member | None = None
        self.num_starts = 0
        self.is_leaving = False
        self.has_given_up = False
        self.lost_at: float | None = None
