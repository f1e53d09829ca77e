"""Receivers that die or hang in the middle of a weight transfer, and what heals it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
import torch
from local_ray import local_ray
from receiving_actor import ReceivingActor
from receiving_process import serve
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from actors.gloo_sender import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from actors.node import LOOPBACK, free_port
from actors.sync import GeneratorClient
from actors.transfer_errors import TransferBrokenError
from real_ray.errors import SyncError

SHORT_S = 3.0  # a timeout that is waited for
LONG_S = 60.0  # one that is not
MIDDLE = "20"


class Source(WeightSource):
    """80 MiB, more than the buffers of a few sockets take."""

    def __init__(self) -> None:
        self.weights = {str(index): torch.randn(512, 1024) for index in range(40)}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())


class Rank:
    """A learner rank."""

    def __init__(self) -> None:
        self.source = Source()
        self.sender: Any = None

    def connect(
        self, generators: dict[str, Any], *, shared_memory: bool = True, timeout_s: float = LONG_S
    ) -> None:
        if self.sender is not None:
            self.sender.shutdown()
            self.sender = None
        self.client = GeneratorClient(generators, workers_per_generator=1, timeout_s=timeout_s)
        self.sender = GlooTrainerWeightTransferEngine.trainer_init(
            GlooTrainerInitInfo(
                LOOPBACK,
                free_port(LOOPBACK),
                1 + len(generators),
                timeout_s=timeout_s,
                bucket_bytes=2**22,
                shared_memory=shared_memory,
                rank=0,
            ),
            client=self.client,
            source=self.source,
        )

    def send(self, version: int) -> None:
        assert self.sender is not None
        self.client.policy_version = version
        self.sender.send_weights()
        for generator in self.client._generators.values():
            assert ray.get(generator.weights.remote()) == (
                version,
                self.sender.checksums,
                [],
            )


@dataclass(frozen=True)
class Pool:
    """Those that are still well after a test serve the next one."""

    directory: Path  # of sockets
    started: dict[str, Any]
    processes: list[Any]

    def start(self, name: str) -> Any:
        """A new process, forked from one that has all imports, and the actor before it."""
        address = f"{self.directory}/{len(self.processes)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            process = multiprocessing.get_context("forkserver").Process(
                target=serve, args=(listener,), daemon=True
            )
            process.start()
        self.processes.append(process)
        self.started[name] = ray.remote(ReceivingActor).options(num_cpus=0.1).remote(address)
        return self.started[name]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with TemporaryDirectory(prefix="rr-") as directory:
        context = multiprocessing.get_context("forkserver")
        # Not this module's: the server knows `sys.path` only when it forks.
        context.set_forkserver_preload(["actors.gloo_receiver", "actors.gloo_group"])
        forkserver.ensure_running()  # it imports while Ray starts
        pool = Pool(Path(directory), {}, [])
        with local_ray({"PYTHONPATH": str(Path(__file__).parents[1])}):
            yield pool
        for process in pool.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def rank() -> Rank:
    return Rank()


@pytest.fixture
def generators(pool: Pool) -> Iterator[dict[str, Any]]:
    for name in sorted({"generator-3", "generator-7"} - pool.started.keys()):
        pool.start(name)
    generators = {name: pool.started[name] for name in ("generator-3", "generator-7")}
    pids = dict(
        zip(generators, ray.get([g.pid.remote() for g in generators.values()]), strict=True)
    )
    yield generators
    for name, pid in pids.items():
        if not is_running(pid):
            del pool.started[name]


def is_running(pid: int) -> bool:
    """False if it has died or is stopped; a stopped one is killed, it does not end by itself."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    if state == "T":
        os.kill(pid, signal.SIGKILL)
    return state in "RSD"


@pytest.mark.parametrize(
    ("victim", "number"), [("generator-3", signal.SIGSTOP), ("generator-7", signal.SIGKILL)]
)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "gloo"])
def test_a_receiver_that_dies_or_hangs_is_named_and_the_other_goes_on(
    rank: Rank,
    pool: Pool,
    generators: dict[str, Any],
    *,
    victim: str,
    number: signal.Signals,
    shared_memory: bool,
) -> None:
    hangs = number == signal.SIGSTOP
    rank.connect(generators, shared_memory=shared_memory, timeout_s=SHORT_S if hangs else LONG_S)
    rank.send(1)
    ray.get(generators[victim].signal_at.remote(MIDDLE, int(number)))
    began = time.monotonic()
    with pytest.raises(SyncError, match=victim) as caught:
        rank.send(2)
    assert caught.value.generators == (victim,)
    assert rank.client.error is caught.value
    # One that has died is known at once; one that hangs, at the deadline.
    assert time.monotonic() - began < (SHORT_S + 1 if hangs else LONG_S / 4)
    with pytest.raises(TransferBrokenError, match="Connect again"):
        rank.send(2)

    other = {name: g for name, g in generators.items() if name != victim}
    if not hangs and shared_memory:
        other["generator-8"] = pool.start(victim)
    rank.connect(other, shared_memory=shared_memory)
    rank.send(3)
    # The other one did not wait for the rest of the broken transfer until its own deadline.
    assert time.monotonic() - began < LONG_S / 2


def test_a_receiver_that_does_not_come_is_named(rank: Rank, generators: dict[str, Any]) -> None:
    os.kill(ray.get(generators["generator-7"].pid.remote()), signal.SIGSTOP)
    with pytest.raises(SyncError, match="generator-7 did not join") as caught:
        rank.connect(generators, timeout_s=SHORT_S)
    assert caught.value.generators == ("generator-7",)
    rank.connect({"generator-3": generators["generator-3"]})
    rank.send(1)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "gloo"])
def test_groups_that_are_formed_again_leave_nothing_behind(
    rank: Rank, generators: dict[str, Any], shared_memory: bool
) -> None:
    def num_open() -> list[tuple[int, int]]:
        here = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
        return [here, *ray.get([g.num_open.remote() for g in generators.values()])]

    def more(now: tuple[int, int], then: tuple[int, int]) -> bool:
        return now[0] > then[0] or now[1] > then[1]

    rank.connect(generators, shared_memory=shared_memory)
    rank.send(1)
    before = num_open()
    for version in range(2, 6):
        rank.connect(generators, shared_memory=shared_memory)
        rank.send(version)
    deadline = time.monotonic() + LONG_S
    while any(more(now, then) for now, then in zip(num_open(), before, strict=True)):
        assert time.monotonic() < deadline, (before, num_open())
