"""The sending side of the weight transfer over gloo, in the learner."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from socket import socket
from typing import ClassVar, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    WeightTransferUpdateInfo,
)

from actors.buckets import checksum, num_bytes, split, total_bytes, views
from actors.gloo_group import GlooInitInfo, Wire, open_group
from actors.node import listen
from actors.transfer_errors import BROADCAST_SHARE, BROKE_OFF, TransferBrokenError
from real_ray.errors import ResourceError, SyncError

BACKEND = "gloo"
_POLL_S = 0.1
_had: set[tuple[str, int]] = set()  # addresses of groups that this process has formed


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Names, dtypes and shapes of the tensors of one update, in the order of sending."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    output_layer: str  # name of the tensor whose values the output layer has; empty: not known

    def metadata(self) -> list[ParamMeta]:
        """As the sender's source declared it."""
        return [
            ParamMeta(name, getattr(torch, dtype_name), tuple(shape))
            for name, dtype_name, shape in zip(
                self.names, self.dtype_names, self.shapes, strict=True
            )
        ]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """What the learner needs to open the group as its rank 0."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float = 300.0
    bucket_bytes: int = 2**24
    output_layer: str = ""
    shared_memory: bool = True  # where all members are on one machine


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The sending side. Every learner rank iterates the source; rank 0 also sends.

    A source may yield each tensor in memory that it uses again for the next one.
    """

    init_info_cls = GlooTrainerInitInfo

    _wire: Wire | None = None

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None,
        info: GlooTrainerInitInfo,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self.checksums: dict[str, int] = {}  # of the last update, by tensor
        self.seconds: dict[str, float] = {}  # that the last update took, by part

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        engine = cls(client=client, source=source, info=init_info)
        if engine.is_sender:
            engine._wire = engine._form_group()
        return engine

    def _form_group(self) -> Wire:
        info = self._info
        join = GlooInitInfo(
            master_address=info.master_address,
            master_port=info.master_port,
            rank_offset=1,
            world_size=info.world_size,
            timeout_s=info.timeout_s,
            group_id=uuid.uuid4().hex,
            bucket_bytes=info.bucket_bytes,
        )
        listener = _listen(join)  # refused before anybody waits
        # The rendezvous completes only when both sides are in it.
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            joined = pool.submit(self.client.init_weight_transfer_engine, asdict(join))
            try:
                wire = open_group(join, listener, joined, shared_bytes=self._shared_bytes())
            except TransferBrokenError:
                joined.result()  # knows better who did not come
                raise
            try:
                joined.result()
            except BaseException:
                wire.close()
                raise
        finally:
            pool.shutdown(wait=False)  # the receivers' answer may never come
        return wire

    def send_weights(self) -> None:
        """Send all tensors of the source to all receivers.

        Raises:
            TransferBrokenError: there is no group, or it broke.
        """
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:  # takes part in gathering partitioned parameters
                pass
            return
        if self._wire is None:
            raise TransferBrokenError("there is no group: an earlier update failed. Connect again")
        try:
            self._update(self._wire, self.source)
        except BaseException:
            self.shutdown()
            raise

    def _update(self, wire: Wire, source: WeightSource) -> None:
        began = time.monotonic()
        metadata = source.metadata()
        update = GlooUpdateInfo(
            names=[meta.name for meta in metadata],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metadata],
            shapes=[list(meta.shape) for meta in metadata],
            output_layer=self._info.output_layer,
        )
        self.client.start_weight_update()
        self.seconds = {"start": time.monotonic() - began, "gather": 0.0, "transfer": 0.0}
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            received = pool.submit(self.client.update_weights, asdict(update))
            try:
                self._broadcast_all(wire, source, metadata, received)
            except TransferBrokenError:
                self.shutdown()  # who waits for more gets an error now
                received.result()  # knows who is to blame
                raise
            began = time.monotonic()
            received.result()
            self.seconds["load"] = time.monotonic() - began  # what was not done meanwhile
        finally:
            pool.shutdown(wait=False)  # after a failed send an answer may never come
        began = time.monotonic()
        self.client.finish_weight_update()
        self.seconds["finish"] = time.monotonic() - began

    def _broadcast_all(
        self,
        wire: Wire,
        source: WeightSource,
        metadata: list[ParamMeta],
        received: Future[None],
    ) -> None:
        """One broadcast a bucket; the next bucket is filled while one is on the wire."""

        def still_wanted() -> None:
            if received.done():  # they end early only by an error
                raise TransferBrokenError(f"{BROKE_OFF} by a receiver")

        # Receivers then have time to say how they failed.
        wire.start(time.monotonic() + BROADCAST_SHARE * self._info.timeout_s, still_wanted)
        tensors = _checked(source, metadata)
        self.checksums = {}
        for bucket in self._buckets(metadata):
            began = time.monotonic()
            buffer = wire.take(total_bytes(bucket))
            taken = time.monotonic()
            self._fill(buffer, bucket, tensors)
            filled = time.monotonic()
            wire.send(buffer)
            self.seconds["gather"] += filled - taken
            self.seconds["transfer"] += taken - began + time.monotonic() - filled
        began = time.monotonic()
        wire.flush()
        self.seconds["transfer"] += time.monotonic() - began
        next(tensors, None)  # a source that yields more than it declared is refused, too

    def _fill(self, buffer: Tensor, bucket: list[ParamMeta], tensors: Iterator[Tensor]) -> None:
        for meta, place in zip(bucket, views(buffer, bucket), strict=True):
            place.copy_(next(tensors))
            self.checksums[meta.name] = checksum(place)

    def _buckets(self, metadata: list[ParamMeta]) -> list[list[ParamMeta]]:
        parts = split([num_bytes(meta) for meta in metadata], self._info.bucket_bytes)
        return [metadata[part] for part in parts]

    def _shared_bytes(self) -> int:
        """Of the largest bucket; 0: no shared memory is wanted."""
        assert self.source is not None
        if not self._info.shared_memory:
            return 0
        return max(map(total_bytes, self._buckets(self.source.metadata())), default=0)

    def shutdown(self) -> None:
        """Leave the group; receivers that wait for more get an error."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _listen(info: GlooInitInfo) -> socket:
    """A socket at the master's address.

    Raises:
        ResourceError: the port is in use.
        SyncError: it is in use by an earlier group of this process, which does not end.
    """
    where = (info.master_address, info.master_port)
    deadline = time.monotonic() + BROADCAST_SHARE * info.timeout_s
    while True:
        try:
            listener = listen(*where)
            _had.add(where)
            return listener
        except ResourceError as error:
            # A group that broke keeps its port until its last broadcast has given up.
            if where not in _had:
                raise
            if time.monotonic() > deadline:
                raise SyncError(
                    f"no new weight-transfer group: an earlier one has not ended within "
                    f"{BROADCAST_SHARE * info.timeout_s:g} s: {error}"
                ) from error
        time.sleep(_POLL_S)


def _checked(source: WeightSource, metadata: list[ParamMeta]) -> Iterator[Tensor]:
    """What the source yields, as it was declared: receivers cut their buffers by that."""
    for meta, (name, tensor) in zip(metadata, source, strict=True):
        sent = (name, tensor.dtype, tuple(tensor.shape))
        declared = (meta.name, meta.dtype, tuple(meta.shape))
        if sent != declared:
            raise ValueError(f"weight source yields {sent} where it declared {declared}")
        yield tensor
