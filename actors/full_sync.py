"""Weight sync of whole models through vLLM's weight transfer."""

from __future__ import annotations

import math

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from actors.protocol import SyncRendezvous
from actors.sync import GeneratorClient
from actors.weight_source import DeepSpeedWeightSource
from actors.weight_transfer import GlooTrainerInitInfo, register


class FullSender:
    """Sends all weights of a model to all generators, with adapters of LoRA merged in.

    Forms the weight-transfer group: all ranks and all generators take part.

    Args:
        model: the Hugging Face model inside the DeepSpeed engine.
        client: holds the generators, and the label of the next update.
        dtype: of the tensors sent.
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
        source = DeepSpeedWeightSource(model, dtype)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            _init_info(rendezvous, rank=rank), client=client, source=source
        )
        metadata = source.metadata()
        self.num_tensors = len(metadata)
        self.num_bytes = sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in metadata)

    def send_weights(self) -> None:
        """Send the weights, labelled ``client.policy_version``; all ranks together.

        Raises:
            SyncError: a generator failed or did not answer in time.
        """
        self._engine.send_weights()


def _init_info(rendezvous: SyncRendezvous, *, rank: int) -> TrainerInitInfo:
    """What vLLM's trainer engine of the chosen back end is started with."""
    where = (rendezvous.master_address, rendezvous.master_port, rendezvous.world_size)
    if rendezvous.backend == "nccl":
        return NCCLTrainerInitInfo(*where, rank=rank)
    return GlooTrainerInitInfo(*where, timeout_s=rendezvous.timeout_s, rank=rank)
