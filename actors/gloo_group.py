"""The group of a weight transfer on CPUs: the sender is rank 0, all others receive."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import socket
from typing import Any

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from actors.buckets import Buffers
from actors.node import address_towards
from actors.shared_wire import SharedWire, create, place_in_memory
from actors.transfer_errors import BROADCAST_SHARE, BROKE_OFF, TransferBrokenError

_POLL_S = 0.1
_LEFT = "left"  # a key: the sender has closed the group


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a generator's worker needs to join the group; `rank_offset` is its first rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    group_id: str  # keeps those who are late for an earlier group out of a later one
    bucket_bytes: int


class Broadcast:
    """One broadcast that is under way. Keeps its buffer alive."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, still_wanted: Callable[[], None]) -> Tensor:
        """The tensor, once it is sent or received.

        Args:
            still_wanted: called now and then; raises `TransferBrokenError` to end the wait. Gloo
                itself does not notice that a connection was closed between two broadcasts.

        Raises:
            TransferBrokenError: it never will be.
        """
        while not self._is_done_soon():
            still_wanted()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransferBrokenError(f"{BROKE_OFF}: {error}") from error
        return self._tensor

    def _is_done_soon(self) -> bool:
        with contextlib.suppress(RuntimeError):  # if it has failed, wait() tells
            self._work.wait(timedelta(seconds=_POLL_S))
        done: bool = self._work.is_completed()
        return done


class GlooWire:
    """Both sides of the transfer: one broadcast a bucket, two buckets under way.

    Has no global state; several may exist in one process.
    """

    def __init__(self, store: Any, info: GlooInitInfo, *, rank: int) -> None:
        self._store = store
        self._is_sender = rank == 0
        self._buffers = Buffers(info.bucket_bytes)
        self._under_way: Broadcast | None = None
        gloo: Any = dist.ProcessGroupGloo  # torch's types do not have this constructor
        options = gloo._Options()
        options._timeout = timedelta(seconds=info.timeout_s)
        options._devices = [_device(info.master_address)]
        self._group: Any = gloo(dist.PrefixStore("gloo", store), rank, info.world_size, options)

    def start(self, deadline: float, still_wanted: Callable[[], None]) -> None:
        """Before an update, for the sender.

        Args:
            deadline: of all buckets, in the time of `time.monotonic`.
            still_wanted: called now and then; raises `TransferBrokenError` to end a wait.
        """
        self._deadline, self._still_wanted = deadline, still_wanted

    def take(self, size: int) -> Tensor:
        """Memory for the next bucket: uint8 [size]."""
        return self._buffers.take(size)

    def send(self, buffer: Tensor) -> None:
        """Begin to send a bucket that was filled; the one before has arrived then."""
        self.flush()
        self._under_way = self._broadcast(buffer, self._deadline)

    def flush(self) -> None:
        """Wait until all have all buckets."""
        if self._under_way is not None:
            self._under_way.wait(self._still_wanted)
            self._under_way = None

    def receive(self, sizes: Sequence[int], buffers: Buffers, deadline: float) -> Iterator[Tensor]:
        """Buckets of these sizes in bytes; the next one comes in while one is used."""
        coming = self._broadcast(buffers.take(sizes[0]), deadline) if sizes else None
        for index in range(len(sizes)):
            assert coming is not None
            buffer = coming.wait(self._check_sender)
            coming = None
            if index + 1 < len(sizes):
                coming = self._broadcast(buffers.take(sizes[index + 1]), deadline)
            yield buffer
            del buffer

    def close(self) -> None:
        """Leave the group. Whoever waits for this member gets an error."""
        if self._is_sender and self._store is not None:
            self._store.set(_LEFT, "")
        # The destructor waits for a broadcast that is under way, which may be until its deadline,
        # and keeps connections and store until then.
        last = [self._group]
        self._group = self._store = self._under_way = None
        threading.Thread(target=last.clear, name="close-gloo-group", daemon=True).start()

    def _broadcast(self, buffer: Tensor, deadline: float) -> Broadcast:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        return Broadcast(self._group.broadcast([buffer], options), buffer)

    def _check_sender(self) -> None:
        try:
            has_left = self._store.check([_LEFT])  # the store lives in the sender
        except RuntimeError as error:
            raise TransferBrokenError(f"{BROKE_OFF}: the sender has gone: {error}") from error
        if has_left:
            raise TransferBrokenError(f"{BROKE_OFF} by the sender")


Wire = GlooWire | SharedWire


def open_group(
    info: GlooInitInfo, listener: socket, joined: Future[None], *, shared_bytes: int
) -> Wire:
    """Form the group as its rank 0; every receiver calls `join_group`.

    Args:
        listener: a socket that listens at the master's address.
        joined: the answer of the receivers. An error there ends the wait.
        shared_bytes: of the largest bucket, for shared memory; 0: without.

    Raises:
        TransferBrokenError: a receiver did not come in time.
    """
    # Those who wait for a missing one then have time to say that they are not to blame.
    deadline = time.monotonic() + BROADCAST_SHARE * info.timeout_s
    store = _store(info, listener)
    path: Path | None = None
    try:
        ranks = range(1, info.world_size)
        for rank in ranks:
            _await_key(store, f"arrived/{rank}", joined, deadline)
        here = place_in_memory()
        if (
            shared_bytes
            and here
            and all(store.get(f"arrived/{rank}").decode() == here for rank in ranks)
        ):
            path = create(info.group_id, shared_bytes)
        store.set("path", "" if path is None else str(path))
        if path is None:
            return _gloo_wire(store, info, rank=0)
        wire = SharedWire(store, path, rank=0, world_size=info.world_size)
        for rank in ranks:
            _await_key(store, f"opened/{rank}", joined, deadline)
        return wire
    finally:
        del store  # the traceback of an error would keep it, and those who wait at it
        if path is not None:
            path.unlink()


def join_group(info: GlooInitInfo, *, rank: int) -> Wire:
    """Join the group as a receiver; `rank` is above 0.

    Raises:
        TransferBrokenError: the sender or another receiver did not come in time.
    """
    try:
        store = _store(info)
        store.set(f"arrived/{rank}", place_in_memory())
        path = store.get("path").decode()
        if path:
            wire = SharedWire(store, Path(path), rank=rank, world_size=info.world_size)
            store.set(f"opened/{rank}", "")
            return wire
    except RuntimeError as error:
        raise TransferBrokenError(f"{BROKE_OFF}: no group to join: {error}") from error
    return _gloo_wire(store, info, rank=rank)


def _await_key(store: Any, key: str, joined: Future[None], deadline: float) -> None:
    try:
        while not store.check([key]):
            if joined.done():
                joined.result()
            if time.monotonic() > deadline:
                raise TransferBrokenError(f"not all receivers came in time ({key})")
            wait([joined], timeout=_POLL_S)
    finally:
        del store  # as in open_group


def _gloo_wire(store: Any, info: GlooInitInfo, *, rank: int) -> GlooWire:
    try:
        return GlooWire(store, info, rank=rank)
    except RuntimeError as error:
        raise TransferBrokenError(f"{BROKE_OFF}: the group was not formed: {error}") from error


def _device(master_address: str) -> Any:
    """The network interface that this machine has towards the sender's.

    By itself gloo takes what the machine's name resolves to, which others may not reach.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):  # somebody knows better
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname=address_towards(master_address))


def _store(info: GlooInitInfo, listener: socket | None = None) -> Any:
    store = dist.TCPStore(
        info.master_address,
        info.master_port,
        is_master=listener is not None,
        timeout=timedelta(seconds=info.timeout_s),
        wait_for_workers=False,
        # Without it the store would listen on all interfaces.
        master_listen_fd=None if listener is None else listener.detach(),
        use_libuv=False,
    )
    return dist.PrefixStore(info.group_id, store)
