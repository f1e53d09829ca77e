"""Weight transfer over gloo, for machines without GPUs: a vLLM plugin.

vLLM's own back ends (`nccl`, ...) all need GPUs. This one stands behind the same two base
classes (`vllm.distributed.weight_transfer.base`), so a CPU run takes the code path of a GPU run
and only the back end's name differs. One process group holds the sending learner rank (rank 0)
and every worker of every generator.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from socket import socket
from typing import Any, ClassVar, Self

import torch
from torch.distributed import BroadcastOptions, ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors import float_head
from actors.node import listen

BACKEND = "gloo"


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every vLLM process, possibly repeatedly."""
    _die_with_parent()
    # vLLM refuses to register a name twice, and its registry cannot be asked.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerWeightTransferEngine)
    float_head.register()


def _die_with_parent() -> None:
    """Let the kernel end this engine process when the process that started it dies.

    A killed generator actor would otherwise leave its EngineCore and Worker behind, holding
    the model's memory.
    """
    if multiprocessing.parent_process() is None:
        return  # not a child of an engine
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a generator's worker needs to join the group; `rank_offset` is its first rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Names, dtypes and shapes of the tensors of one update, in the order of sending."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The receiving side, in each worker process of a generator."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        worker = (
            self.parallel_config.data_parallel_index * self.parallel_config.world_size
            + self.parallel_config.rank
        )
        self._group = _join(init_info, rank=init_info.rank_offset + worker)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # vLLM repacks a copy of the output layer's weight for the CPU. Where it is tied to the
        # embedding nothing is loaded under its own name, so only we know that the copy is stale.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
            elif isinstance(layer, float_head.FloatHead):
                layer.weights_changed()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises the accelerator afterwards; there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self._group is not None, "init_weight_transfer_engine comes first"
        group = self._group

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
                _broadcast(group, tensor)
                yield name, tensor

        self.model.load_weights(received())

    def shutdown(self) -> None:
        self._group = None


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """What the learner needs to open the group as its rank 0."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float = 300.0


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The sending side. Every learner rank iterates the source; rank 0 also sends."""

    init_info_cls = GlooTrainerInitInfo

    _group: ProcessGroup | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not engine.is_sender:
            return engine
        join = GlooInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )
        listener = listen(join.master_address, join.master_port)  # refused before anybody waits
        # The rendezvous completes only when both sides are in it.
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            joined = pool.submit(client.init_weight_transfer_engine, asdict(join))
            engine._group = _join(join, rank=0, listener=listener)
            joined.result()
        finally:
            pool.shutdown(wait=False)  # the receivers' answer may never come
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:  # takes part in gathering partitioned parameters
                pass
            return
        metadata = self.source.metadata()
        update = GlooUpdateInfo(
            names=[meta.name for meta in metadata],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metadata],
            shapes=[list(meta.shape) for meta in metadata],
        )
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            received = pool.submit(self.client.update_weights, asdict(update))
            self._send(self.source, metadata)
            received.result()
        finally:
            # After a failed send the receivers never answer: joining would hang.
            pool.shutdown(wait=False)
        self.client.finish_weight_update()

    def _send(self, source: WeightSource, metadata: list[ParamMeta]) -> None:
        assert self._group is not None
        for meta, (name, tensor) in zip(metadata, source, strict=True):
            sent = (name, tensor.dtype, tuple(tensor.shape))
            declared = (meta.name, meta.dtype, tuple(meta.shape))
            if sent != declared:
                raise ValueError(f"weight source yields {sent} where it declared {declared}")
            _broadcast(self._group, tensor.contiguous())

    def shutdown(self) -> None:
        self._group = None


def _join(info: GlooInitInfo, *, rank: int, listener: socket | None = None) -> ProcessGroup:
    group = stateless_init_torch_distributed_process_group(
        info.master_address,
        info.master_port,
        rank,
        info.world_size,
        backend=BACKEND,
        timeout=timedelta(seconds=info.timeout_s),
        listen_socket=listener,  # without it, rank 0 would listen on all interfaces
    )
    assert isinstance(group, ProcessGroup)
    return group


def _broadcast(group: ProcessGroup, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
