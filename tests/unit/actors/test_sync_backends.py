"""What vLLM's trainer engines are started with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from actors.full_sync import plan
from actors.gloo_sender import GlooTrainerInitInfo
from actors.protocol import SyncRendezvous
from real_ray.errors import ResourceError


class Tied(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, device=device)
        self.lm_head = nn.Linear(4, 7, bias=False, device=device)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class OnGpu(Tied):
    """Says that it is on a GPU, and has no values."""

    def __init__(self) -> None:
        super().__init__("meta")
        self.embed.weight = self.lm_head.weight = FarParameter(self.embed.weight)


class FarParameter(nn.Parameter):
    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def rendezvous(backend: str) -> Any:
    return SyncRendezvous(
        backend=backend,
        master_address="127.0.0.1",
        master_port=1234,
        num_generators=3,
        workers_per_generator=2,
        timeout_s=5.0,
        bucket_bytes=2**26,
    )


def test_gloo() -> None:
    info, source = plan(Tied("cpu"), torch.bfloat16, rendezvous("gloo"), rank=0)
    assert info == GlooTrainerInitInfo(
        "127.0.0.1",
        1234,
        7,
        timeout_s=5.0,
        bucket_bytes=2**24,
        output_layer="embed.weight",
        rank=0,
    )
    assert [meta.name for meta in source.metadata()] == ["embed.weight"]


def test_nccl_packs_into_the_same_buckets() -> None:
    info, _ = plan(OnGpu(), torch.bfloat16, rendezvous("nccl"), rank=1)
    assert info == NCCLTrainerInitInfo("127.0.0.1", 1234, 7, packed_buffer_size_bytes=2**26, rank=1)
    assert info.packed


def test_nccl_m2n_has_all_learner_ranks_in_its_group() -> None:
    info, source = plan(OnGpu(), torch.bfloat16, rendezvous("nccl_m2n"), rank=0)
    assert isinstance(info, M2NTrainerInitInfo)
    assert (info.world_size, info.num_trainer_ranks) == (7, 1)
    assert [(m.name, m.shape, m.placements) for m in source.metadata()] == [
        ("embed.weight", (7, 4), None)
    ]
    assert source.mesh().dims == (1, 1)


@pytest.mark.parametrize("backend", ["nccl", "nccl_m2n"])
def test_back_ends_that_need_gpus(backend: str) -> None:
    with pytest.raises(ResourceError, match=f"sync.backend: {backend} needs GPUs"):
        plan(Tied("cpu"), torch.bfloat16, rendezvous(backend), rank=0)
