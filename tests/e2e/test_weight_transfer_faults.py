"""Receivers that die or hang in the middle of a weight transfer, and what heals it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from local_ray import local_ray
from receiving_actor import ReceivingActor
from torch import nn

from actors.gloo_sender import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from actors.node import LOOPBACK, free_port
from actors.sync import GeneratorClient
from actors.transfer_errors import TransferBrokenError
from actors.weight_source import DeepSpeedWeightSource
from real_ray.errors import SyncError

TIMEOUT_S = 8.0
MIDDLE = "layers.20.weight"


class Policy(nn.Module):
    """80 MiB, more than the buffers of a few sockets take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(40))


class Rank:
    """A learner rank."""

    def __init__(self) -> None:
        self.source = DeepSpeedWeightSource(Policy(), torch.float32, copies=False)
        self.sender: Any = None

    def connect(
        self,
        generators: dict[str, Any],
        *,
        shared_memory: bool = True,
        timeout_s: float = TIMEOUT_S,
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


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    env = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}
    with local_ray(env):
        yield


@pytest.fixture(scope="module")
def rank() -> Rank:
    return Rank()


@pytest.fixture(scope="module")
def pool() -> dict[str, Any]:
    """Those that are still well after a test serve the next one."""
    return {}


@pytest.fixture
def generators(pool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in {"generator-3", "generator-7"} - pool.keys():
        pool[name] = start()
    pids = {name: ray.get(pool[name].pid.remote()) for name in sorted(pool)}
    yield {name: pool[name] for name in pids}
    for name, pid in pids.items():
        if not is_running(pid):
            del pool[name]


def is_running(pid: int) -> bool:
    """False if it has died or is stopped; a stopped one is killed, it does not end by itself."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    if state == "T":
        os.kill(pid, signal.SIGKILL)
    return state in "RSD"


def start() -> Any:
    return ray.remote(ReceivingActor).options(num_cpus=0.1).remote()


@pytest.mark.parametrize(
    ("victim", "number"), [("generator-3", signal.SIGSTOP), ("generator-7", signal.SIGKILL)]
)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "gloo"])
def test_a_receiver_that_dies_or_hangs_is_named_and_the_other_goes_on(
    rank: Rank, generators: dict[str, Any], victim: str, number: signal.Signals, shared_memory: bool
) -> None:
    rank.connect(generators, shared_memory=shared_memory)
    rank.send(1)
    ray.get(generators[victim].signal_at.remote(MIDDLE, int(number)))
    began = time.monotonic()
    with pytest.raises(SyncError, match=victim) as caught:
        rank.send(2)
    assert caught.value.generators == (victim,)
    # One that has died is known at once; one that hangs, at the deadline.
    bound = TIMEOUT_S + 1 if number == signal.SIGSTOP else 0.8 * TIMEOUT_S
    assert time.monotonic() - began < bound
    with pytest.raises(TransferBrokenError, match="Connect again"):
        rank.send(2)

    other = {name: g for name, g in generators.items() if name != victim}
    if number == signal.SIGKILL and shared_memory:
        other["generator-8"] = start()
        ray.get(other["generator-8"].pid.remote())
    rank.connect(other, shared_memory=shared_memory)
    rank.send(3)


def test_a_receiver_that_does_not_come_is_named(rank: Rank, generators: dict[str, Any]) -> None:
    os.kill(ray.get(generators["generator-7"].pid.remote()), signal.SIGSTOP)
    with pytest.raises(SyncError, match="generator-7 did not join") as caught:
        rank.connect(generators, timeout_s=4.0)
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
    for version in range(2, 8):
        rank.connect(generators, shared_memory=shared_memory)
        rank.send(version)
    deadline = time.monotonic() + TIMEOUT_S
    while any(more(now, then) for now, then in zip(num_open(), before, strict=True)):
        assert time.monotonic() < deadline, (before, num_open())
