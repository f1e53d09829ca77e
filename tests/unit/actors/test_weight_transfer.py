"""Weight transfer over gloo between one sender and several receivers, all in this process."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from actors.gloo_group import GlooWire
from actors.gloo_sender import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from actors.node import LOOPBACK, address_towards, free_port, listen
from actors.transfer_errors import TransferBrokenError
from actors.weight_transfer import register
from real_ray.errors import ResourceError, SyncError

WEIGHTS = {
    "embed": torch.randn(5, 3).to(torch.bfloat16),
    "norm": torch.randn(4),
    "transposed": torch.randn(2, 6).T,  # not contiguous
    "scale": torch.tensor(1.5),  # no dimensions
    "counts": torch.arange(7),
}


class Model(nn.Module):
    """What a receiver loads into."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        self.weights = dict(weights)
        return set(self.weights)


class Source(WeightSource):
    def __init__(self, weights: dict[str, Tensor], declared: list[ParamMeta] | None = None) -> None:
        self.weights = weights
        self.num_yielded = 0
        self._declared = declared

    def metadata(self) -> list[ParamMeta]:
        return self._declared or [ParamMeta(n, t.dtype, t.shape) for n, t in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            self.num_yielded += 1
            yield name, tensor


class Client:
    """vLLM's weight-sync client for receivers in threads: generators of ``workers`` ranks each."""

    def __init__(self, *, generators: int = 1, workers: int = 1) -> None:
        self.models = [Model() for _ in range(generators * workers)]
        self.calls: list[str] = []
        self._workers = workers
        self.engines = [
            WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="gloo"),
                SimpleNamespace(
                    parallel_config=SimpleNamespace(
                        data_parallel_index=0, world_size=workers, rank=index % workers
                    ),
                    model_config=None,
                ),
                torch.device("cpu"),
                model,
            )
            for index, model in enumerate(self.models)
        ]
        self._threads = ThreadPoolExecutor(len(self.engines))

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        def join(index: int) -> None:
            first = info["rank_offset"] + index // self._workers * self._workers
            engine = self.engines[index]
            engine.init_transfer_engine(engine.parse_init_info({**info, "rank_offset": first}))

        list(self._threads.map(join, range(len(self.engines))))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append("update")
        list(self._threads.map(lambda engine: engine.update_weights(info), self.engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        for engine in self.engines:
            engine.finish_weight_update()


@pytest.fixture(autouse=True)
def registered() -> None:
    """As in every vLLM process, for every test: the plugin may be loaded repeatedly."""
    register()


def connect(
    client: Client,
    source: Source,
    *,
    rank: int = 0,
    port: int | None = None,
    bucket_bytes: int = 200,
    shared_memory: bool = True,
) -> Any:
    info = init_info(client, rank=rank, port=port, bucket_bytes=bucket_bytes)
    info.shared_memory = shared_memory
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def init_info(
    client: Client, *, bucket_bytes: int, rank: int = 0, port: int | None = None
) -> GlooTrainerInitInfo:
    return GlooTrainerInitInfo(
        LOOPBACK,
        port or free_port(LOOPBACK),
        1 + len(client.models),
        timeout_s=30.0,
        bucket_bytes=bucket_bytes,
        rank=rank,
    )


def assert_equal(received: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        torch.testing.assert_close(received[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("generators", "workers"), [(1, 1), (2, 1), (2, 2)])
def test_every_worker_gets_every_tensor_as_it_is(generators: int, workers: int) -> None:
    client, source = Client(generators=generators, workers=workers), Source(WEIGHTS)
    sender = connect(client, source)
    sender.send_weights()
    for model in client.models:
        assert_equal(model.weights, WEIGHTS)

    source.weights = {name: tensor * 2 for name, tensor in WEIGHTS.items()}
    sender.send_weights()
    for model in client.models:
        assert_equal(model.weights, source.weights)
    assert client.calls == ["start", "update", "finish"] * 2


def test_other_learner_ranks_gather_along_and_send_nothing() -> None:
    client, source = Client(), Source(WEIGHTS)
    connect(client, source, rank=1).send_weights()
    assert source.num_yielded == len(WEIGHTS)
    assert client.calls == []


@pytest.mark.parametrize(
    "declared",
    [
        ParamMeta("other", torch.float32, (2,)),
        ParamMeta("a", torch.bfloat16, (2,)),
        ParamMeta("a", torch.float32, (1, 2)),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(declared: ParamMeta) -> None:
    """Receivers have made room for what was declared: the bytes would be read as something else."""
    client = Client()
    sender = connect(client, Source({"a": torch.zeros(2)}, declared=[declared]))
    message = (
        "weight source yields ('a', torch.float32, (2,)) where it declared "
        f"({declared.name!r}, {declared.dtype}, {declared.shape})"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        sender.send_weights()
    assert "finish" not in client.calls


def test_a_port_in_use() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on {LOOPBACK} is in use"):
            connect(Client(), Source(WEIGHTS), port=port)


class CorruptingSender(GlooTrainerWeightTransferEngine):
    """A bit of the first tensor of each bucket changes on the wire."""

    def _fill(self, buffer: Tensor, *arguments: Any) -> None:
        super()._fill(buffer, *arguments)
        buffer[0] ^= 1


@pytest.mark.parametrize(
    ("engine", "wrong"),
    [(GlooTrainerWeightTransferEngine, set()), (CorruptingSender, {"embed"})],
)
def test_checksums_name_a_tensor_that_changed_on_the_wire(engine: Any, wrong: set[str]) -> None:
    client = Client(generators=2)
    sender = engine.trainer_init(
        init_info(client, bucket_bytes=2**20), client=client, source=Source(WEIGHTS)
    )
    sender.send_weights()
    for receiver in client.engines:
        assert sender.checksums.keys() == receiver.checksums.keys() == WEIGHTS.keys()
        assert {n for n, c in sender.checksums.items() if receiver.checksums[n] != c} == wrong


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 150, 2**20])
def test_buckets_of_any_size(bucket_bytes: int, shared_memory: bool) -> None:
    client = Client()
    sender = connect(
        client, Source(WEIGHTS), bucket_bytes=bucket_bytes, shared_memory=shared_memory
    )
    sender.send_weights()
    sender.send_weights()
    assert_equal(client.models[0].weights, WEIGHTS)


def test_a_tensor_that_does_not_fit_is_named() -> None:
    client = Client()

    def load_weights(weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            assert name != "norm", tensor.shape

    client.models[0].load_weights = load_weights  # type: ignore[method-assign]
    sender = connect(client, Source(WEIGHTS))
    with pytest.raises(ValueError, match=re.escape("norm (4,) torch.float32")):
        sender.send_weights()
    with pytest.raises(TransferBrokenError, match="Connect again"):
        sender.send_weights()


def test_a_source_that_yields_more_than_it_declared_is_refused() -> None:
    declared = [ParamMeta("a", torch.float32, (2,))]
    source = Source({"a": torch.zeros(2), "b": torch.zeros(2)}, declared=declared)
    with pytest.raises(ValueError, match="longer"):
        connect(Client(), source).send_weights()


def test_without_room_in_shared_memory_it_goes_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, __: int, ___: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    client = Client(generators=2)
    sender = connect(client, Source(WEIGHTS))
    assert isinstance(sender._wire, GlooWire)
    sender.send_weights()
    assert_equal(client.models[1].weights, WEIGHTS)


@pytest.mark.parametrize(("frees", "timeout_s"), [(True, 30.0), (False, 0.5)])
def test_a_port_that_an_earlier_group_still_has(frees: bool, timeout_s: float) -> None:
    port = free_port(LOOPBACK)
    connect(Client(), Source(WEIGHTS), port=port).shutdown()
    server = listen(LOOPBACK, port)
    info = init_info(client := Client(), bucket_bytes=200, port=port)
    info.timeout_s = timeout_s
    if not frees:
        with server, pytest.raises(SyncError, match=r"not ended within 0\.45 s: port"):
            WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source(WEIGHTS))
        return
    frees_it = threading.Timer(0.5, server.close)
    frees_it.start()
    WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=Source(WEIGHTS)
    ).send_weights()
    frees_it.join()
    assert_equal(client.models[0].weights, WEIGHTS)


def test_it_listens_at_the_address_of_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where the machine's name leads to."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    try:
        own = address_towards("198.51.100.1")  # nobody has it; the way is that to all others
    except OSError:
        pytest.skip("there is no network")
    for address in (LOOPBACK, own):
        before = listening()
        client = Client()
        info = init_info(client, bucket_bytes=200)
        info.master_address, info.master_port = address, free_port(address)
        info.shared_memory = False
        sender: Any = WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=Source(WEIGHTS)
        )
        assert {ip for ip, _ in listening() - before} == {address}
        sender.send_weights()
        assert_equal(client.models[0].weights, WEIGHTS)
        sender.shutdown()


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
