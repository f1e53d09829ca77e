"""Weight sync of whole models through vLLM's weight transfer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from actors.gloo_sender import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from actors.protocol import SyncRendezvous
from actors.sync import GeneratorClient
from actors.weight_source import (
    DeepSpeedWeightSource,
    ReplicatedWeightSource,
    output_layer_name,
)
from actors.weight_transfer import register
from real_ray.errors import ResourceError, SyncError
from real_ray.weights import SentWeights

_GLOO_BUCKET_BYTES = 2**24  # caches hold it, and little waits for the first and the last one


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
        metadata = source.metadata()
        self.num_tensors = len(metadata)
        self.num_bytes = sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in metadata)
        try:
            self._engine = WeightTransferTrainerFactory.trainer_init(
                info, client=client, source=source
            )
        except (SyncError, ResourceError):
            raise
        except Exception as error:
            raise SyncError(f"the weight-transfer group was not formed: {error}") from error

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
        try:
            with self._source.gathering_to_the_end():
                self._engine.send_weights()
        except SyncError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise SyncError(
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

    def close(self) -> None:
        """Leave the group; generators that wait for more get an error."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


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
