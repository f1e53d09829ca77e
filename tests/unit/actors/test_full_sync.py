"""Who is blamed when a weight sync through an engine of vLLM's own fails; on CPU, without Ray."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from actors import full_sync
from actors.full_sync import FullSender
from actors.protocol import SyncRendezvous
from actors.sync import GeneratorClient
from actors.weight_source import DeepSpeedWeightSource
from real_ray.errors import SyncError

DEAD = "generator-1 could not receive the weights: ActorDiedError"
LONG_S = 30.0


class Client(GeneratorClient):
    """Generators that do what a test says."""

    def __init__(self, step: str, happens: str) -> None:
        super().__init__({}, workers_per_generator=1, timeout_s=LONG_S)
        self.policy_version = 3
        self._step, self._happens = step, happens
        self.released = threading.Event()

    def _wait(self, what: str, replies: Any) -> None:
        if what != self._step:
            return
        if self._happens == "fails":
            self.error = SyncError(DEAD, ("generator-1",))
            raise self.error
        self.waits_for = ("generator-2",)
        self.released.wait(LONG_S)


class TrainerEngine:
    """As vLLM's: calls the client in a thread, while it is in a broadcast that others must join.

    Args:
        hides: raises an error of its own when the client's call fails.
        hangs: stays in the broadcast until it is shut down, and is silent about that.
    """

    def __init__(self, client: Client, source: Any, *, hides: bool, hangs: bool) -> None:
        self._client, self._source, self._hides, self._hangs = client, source, hides, hangs
        self._shut = threading.Event()

    def send_weights(self) -> None:
        pool = ThreadPoolExecutor(1)
        received = pool.submit(self._client.update_weights, None)
        pool.shutdown(wait=False)
        tensors = iter(self._source)
        next(tensors)
        if self._hangs and not self._shut.wait(LONG_S):
            raise AssertionError("it was never shut down")
        for _ in () if self._shut.is_set() and not self._hides else tensors:
            pass
        if self._hides and received.exception() is not None:
            raise RuntimeError("ncclRemoteError")
        if not self._hangs:
            received.result()

    def shutdown(self) -> None:
        self._shut.set()


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(client: Client, *, timeout_s: float = LONG_S, **how: bool) -> FullSender:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def trainer_init(_: Any, *, client: Client, source: Any) -> TrainerEngine:
            try:
                client.init_weight_transfer_engine({"rank_offset": 1})
            except SyncError:
                raise RuntimeError("the store has closed") from None
            return TrainerEngine(client, source, **how)

        monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
        monkeypatch.setattr(
            full_sync, "plan", lambda *_, **__: (None, DeepSpeedWeightSource(model, torch.bfloat16))
        )
        rendezvous = SyncRendezvous(
            backend="nccl",
            master_address="127.0.0.1",
            master_port=1,
            num_generators=2,
            workers_per_generator=1,
            timeout_s=timeout_s,
            bucket_bytes=2**20,
        )
        return FullSender(model, client=client, dtype=torch.bfloat16, rendezvous=rendezvous, rank=0)

    return make


def test_a_sync_that_nothing_disturbs(sender: Any) -> None:
    sent = sender(Client("", ""), hides=False, hangs=False).send_weights()
    assert (sent.policy_version, sent.num_tensors, sent.num_bytes) == (3, 4, 2 * 40)


def test_who_could_not_join_is_named(sender: Any) -> None:
    with pytest.raises(SyncError, match=DEAD) as caught:
        sender(Client("join the weight-transfer group", "fails"), hides=False, hangs=False)
    assert caught.value.generators == ("generator-1",)


@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
@pytest.mark.parametrize("hides", [False, True], ids=["tells", "hides"])
def test_who_failed_is_named_whatever_the_engine_does(
    sender: Any, *, hides: bool, hangs: bool
) -> None:
    broken = sender(Client("receive the weights", "fails"), hides=hides, hangs=hangs)
    began = time.monotonic()
    with pytest.raises(SyncError, match=DEAD) as caught:
        broken.send_weights()
    assert caught.value.generators == ("generator-1",)
    assert time.monotonic() - began < LONG_S / 3
    with pytest.raises(SyncError, match="Connect again"):
        broken.send_weights()


@pytest.mark.parametrize("hides", [False, True], ids=["silent", "stops"])
def test_who_is_late_is_named(sender: Any, *, hides: bool) -> None:
    client = Client("receive the weights", "hangs")
    stuck = sender(client, timeout_s=0.5, hides=hides, hangs=True)
    began = time.monotonic()
    with pytest.raises(SyncError, match=r"3: generator-2 did not finish within 0\.5 s") as caught:
        stuck.send_weights()
    assert caught.value.generators == ("generator-2",)
    assert time.monotonic() - began < LONG_S / 3
    client.released.set()
