"""Buckets of a weight transfer in shared memory, where all members are on one machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.buckets import Buffers
from actors.transfer_errors import BROKE_OFF, TransferBrokenError

_DIRECTORY = Path("/dev/shm")
_NUM_SLOTS = 2  # one is filled while the other one is read
_POLL_S = 0.0003  # a bucket takes some milliseconds
_PATIENCE_S = 0.1  # between questions whether the others still want it


def place_in_memory() -> str:
    """The same for all processes that see the same shared memory; empty: there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{_DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


def create(name: str, bucket_bytes: int) -> Path | None:
    """A file for two buckets; None: there is not enough shared memory (in containers often).

    Files that other processes have left behind when they were killed are removed.
    """
    size = _NUM_SLOTS * bucket_bytes
    try:
        # Containers may share the memory, but not the numbers of processes.
        numbers = f"real-ray-{Path('/proc/self/ns/pid').stat().st_ino}-"
        _remove_leftovers(numbers)
        free = os.statvfs(_DIRECTORY)
        if free.f_bavail * free.f_frsize < 2 * size:  # others need some too
            return None
        path = _DIRECTORY / f"{numbers}{os.getpid()}-{name}"
        file = path.open("xb")
    except OSError:
        return None
    with file:
        try:
            # Memory that is promised only would end the first process that writes by SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            path.unlink()
            return None
    return path


def _remove_leftovers(prefix: str) -> None:
    for path in _DIRECTORY.glob(f"{prefix}*-*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # another user's, or just removed
                path.unlink()


class SharedWire:
    """Both sides of the transfer: the sender fills a slot, all receivers copy it out.

    Args:
        store: of the group; carries which buckets are filled and copied.
        path: of a file that `create` made. It may be deleted once all have it.
        rank: 0 sends.
    """

    def __init__(self, store: Any, path: Path, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._receivers = range(1, world_size)
        self._number = 0  # of the next bucket, counted by each member
        self._num_copied = 0
        with path.open("r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
        self._slots = torch.from_numpy(memory).chunk(_NUM_SLOTS)

    def start(self, deadline: float, still_wanted: Callable[[], None]) -> None:
        """Before an update, for the sender; as in `GlooWire`."""
        self._deadline, self._still_wanted = deadline, still_wanted

    def take(self, size: int) -> Tensor:
        """Memory for the next bucket: uint8 [size]."""
        self._await_copies(self._number - _NUM_SLOTS + 1)
        return self._slots[self._number % _NUM_SLOTS][:size]

    def send(self, _: Tensor) -> None:
        """Tell receivers that the bucket is filled."""
        self._store.set(f"filled/{self._number}", "")
        self._number += 1

    def flush(self) -> None:
        """Wait until all have all buckets."""
        self._await_copies(self._number)

    def receive(self, sizes: Sequence[int], buffers: Buffers, deadline: float) -> Iterator[Tensor]:
        """Buckets of these sizes in bytes, each in memory of the receiver's own."""
        for size in sizes:
            buffer = buffers.take(size)
            self._await([f"filled/{self._number}"], deadline)
            buffer.copy_(self._slots[self._number % _NUM_SLOTS][:size])
            self._store.set(f"copied/{self._number}/{self._rank}", "")
            self._number += 1
            yield buffer
            del buffer

    def close(self) -> None:
        """Leave the group. Whoever waits for this member gets an error."""
        self._store = None

    def _await_copies(self, count: int) -> None:
        """Wait until all receivers have copied so many buckets."""
        while self._num_copied < count:
            number = self._num_copied
            keys = [f"copied/{number}/{rank}" for rank in self._receivers]
            self._await(keys, self._deadline, self._still_wanted)
            for key in (f"filled/{number}", *keys):
                self._store.delete_key(key)
            self._num_copied += 1

    def _await(
        self, keys: list[str], deadline: float, still_wanted: Callable[[], None] | None = None
    ) -> None:
        # Not store.wait(): it writes a warning each time that it has to give up for a moment.
        asked = time.monotonic()
        while not self._are_set(keys):
            now = time.monotonic()
            if now > deadline:
                raise TransferBrokenError(f"{BROKE_OFF}: a bucket was not passed on in time")
            if still_wanted is not None and now > asked + _PATIENCE_S:
                still_wanted()
                asked = now
            time.sleep(_POLL_S)

    def _are_set(self, keys: list[str]) -> bool:
        try:
            done: bool = self._store.check(keys)
        except RuntimeError as error:
            raise TransferBrokenError(f"{BROKE_OFF}: the sender has gone: {error}") from error
        return done
