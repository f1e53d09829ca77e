"""Weight sync of whole models through vLLM's weight transfer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from actors.gloo_sender import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from actors.protocol import SyncRendezvous
from actors.sync import GeneratorClient
from actors.transfer_errors import BROKE_OFF, TransferBrokenError
from actors.weight_source import (
    DeepSpeedWeightSource,
    ReplicatedWeightSource,
    output_layer_name,
)
from actors.weight_transfer import register
from real_ray.errors import ResourceError, SyncError
from real_ray.weights import SentWeights

_GLOO_BUCKET_BYTES = 2**24  # caches hold it, and little waits for the first and the last one
_POLL_S = 0.1  # between looks at whether a generator has failed


class FullSender:
    """Sends all weights of a model to all generators, with adapters of LoRA merged in.

    Forms the weight-transfer group: all ranks and all generators take part.

    Args:
        model: the Hugging Face model inside the DeepSpeed engine.
        client: holds the generators, and the label of the next update.
        dtype: of the tensors sent.

    Raises:
        SyncError: a generator failed or did not come in time.
        ResourceError: the back end cannot work here, or the port is in use.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client: GeneratorClient,
        dtype: torch.dtype,
        rendezvous: SyncRendezvous,
        rank: int,
    ) -> None:
        register()
        self._client = client
        self._engine: Any = None
        info, source = plan(model, dtype, rendezvous, rank=rank)
        self._source = source
        self._timeout_s = rendezvous.timeout_s
        self._on_gpu = next(model.parameters()).device.type == "cuda"
        # vLLM's m2n cannot be interrupted: before its group is destroyed it waits for the GPU.
        watches = rendezvous.backend == "nccl" and rank == 0
        self._stoppable = StoppableSource(source) if watches else None
        metadata = source.metadata()
        self.num_tensors = len(metadata)
        self.num_bytes = sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in metadata)
        client.reset()
        try:
            self._engine = WeightTransferTrainerFactory.trainer_init(
                info, client=client, source=self._stoppable or source
            )
        except (SyncError, ResourceError):
            raise
        except Exception as error:
            raise self._blaming(f"the weight-transfer group was not formed: {error}") from error

    def send_weights(self) -> SentWeights:
        """Send the weights, labelled ``client.policy_version``; all ranks together.

        After an error the group is gone: form a new one.

        Raises:
            SyncError: a generator failed or did not answer in time.
        """
        version = self._client.policy_version
        if self._engine is None:
            raise SyncError(
                f"weight sync of version {version}: there is no weight-transfer group, since an "
                "earlier sync failed. Connect again"
            )
        self._client.reset()
        if self._on_gpu:  # vLLM copies on streams of its own, which do not wait for the optimiser
            torch.accelerator.synchronize()
        try:
            with self._source.gathering_to_the_end(), self._watched():
                self._engine.send_weights()
        except SyncError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise self._blaming(
                f"weight sync of version {version}: {type(error).__name__}: {error}"
            ) from error
        ours = isinstance(self._engine, GlooTrainerWeightTransferEngine)
        return SentWeights(
            policy_version=version,
            num_tensors=self.num_tensors,
            num_bytes=self.num_bytes,
            checksums=dict(self._engine.checksums) if ours else {},
            seconds=dict(self._engine.seconds) if ours else {},
        )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Let the block end when a generator fails or is late: with nccl it would not by itself.

        Raises:
            SyncError: it was ended, and has not raised.
        """
        if self._stoppable is None:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(self._stoppable, over), name="watch-weight-sync", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        if self._stoppable.stopped.is_set():  # a group that is gone sends nothing, in silence
            raise self._blaming("the weight-transfer group was shut down")

    def _watch(self, source: StoppableSource, over: threading.Event) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._client.error is None:
            if over.wait(_POLL_S):
                return
            if time.monotonic() > deadline:
                self._client.give_up(self._timeout_s)
        source.stopped.set()  # first, so that no broadcast begins in a group that is going
        self._engine.shutdown()  # aborts the broadcast that is under way

    def _blaming(self, message: str) -> SyncError:
        """What the client knows of who is to blame; else an error with this message."""
        known = self._client.error
        return SyncError(message) if known is None else SyncError(str(known), known.generators)

    def close(self) -> None:
        """Leave the group; generators that wait for more get an error."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


class StoppableSource(WeightSource):
    """A source whose iteration ends by an error once `stopped` is set."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.stopped = threading.Event()

    def metadata(self) -> list[ParamMeta]:
        metadata: list[ParamMeta] = self._source.metadata()
        return metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            if self.stopped.is_set():
                raise TransferBrokenError(BROKE_OFF)
            if tensor.is_cuda:
                # vLLM changes streams between tensors: what one was copied from may be gone, or
                # not yet there, for the next stream.
                torch.accelerator.current_stream().synchronize()
            yield name, tensor


def plan(
    model: nn.Module, dtype: torch.dtype, rendezvous: SyncRendezvous, *, rank: int
) -> tuple[TrainerInitInfo, DeepSpeedWeightSource]:
    """What vLLM's trainer engine of the chosen back end is started with.

    Raises:
        ResourceError: the back end needs GPUs, and the learner has none.
    """
    bucket_bytes = rendezvous.bucket_bytes
    where = (rendezvous.master_address, rendezvous.master_port)
    if rendezvous.backend == "gloo":
        info: TrainerInitInfo = GlooTrainerInitInfo(
            *where,
            rendezvous.world_size,
            timeout_s=rendezvous.timeout_s,
            bucket_bytes=min(bucket_bytes, _GLOO_BUCKET_BYTES),
            output_layer=output_layer_name(model),
            rank=rank,
        )
        return info, DeepSpeedWeightSource(model, dtype, bucket_bytes=bucket_bytes, copies=False)
    if next(model.parameters()).device.type != "cuda":
        raise ResourceError(
            f"sync.backend: {rendezvous.backend} needs GPUs, and the learner is on a CPU. Set "
            "auto or gloo"
        )
    if rendezvous.backend == "nccl_m2n":
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        source = ReplicatedWeightSource(
            model, dtype, bucket_bytes=bucket_bytes, num_ranks=num_ranks
        )
        # Here all learner ranks are in the group, and not the sending one alone.
        world_size = rendezvous.world_size - 1 + num_ranks
        info = M2NTrainerInitInfo(
            master_address=rendezvous.master_address,
            master_port=rendezvous.master_port,
            world_size=world_size,
            num_trainer_ranks=num_ranks,
            rank=rank,
        )
        return info, source
    info = NCCLTrainerInitInfo(
        *where, rendezvous.world_size, packed_buffer_size_bytes=bucket_bytes, rank=rank
    )
    return info, DeepSpeedWeightSource(model, dtype, bucket_bytes=bucket_bytes)
