"""Receivers of a weight sync, each a process of its own, that load nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actors.node import LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGroup:
    """Where a plain gloo group is formed, beside the one of the weight transfer."""

    port: int
    world_size: int

    def join(self, rank: int) -> Any:
        store = dist.TCPStore(
            LOOPBACK, self.port, is_master=rank == 0, wait_for_workers=False, use_libuv=False
        )
        return dist.ProcessGroupGloo(store, rank, self.world_size, timedelta(seconds=60))


def broadcast(group: Any, tensor: Tensor) -> None:
    """From rank 0, and wait for it."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class Receivers:
    """vLLM's weight-sync client for all of them."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def __enter__(self) -> Receivers:
        self._ask("ready")
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        infos = [{**info, "rank_offset": info["rank_offset"] + i} for i in range(len(self))]
        self._ask("init", infos)

    def start_weight_update(self) -> None:
        self._ask("start")

    def update_weights(self, info: Any) -> None:
        self._ask("update", [info] * len(self))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish")

    def join_raw(self, group: RawGroup) -> None:
        self.tell("join_raw", [(group, rank) for rank in range(1, len(self) + 1)])

    def tell(self, what: str, arguments: Sequence[Any]) -> None:
        """Begin something that needs the sender; `answers` ends it."""
        for pipe, argument in zip(self._pipes, arguments, strict=True):
            pipe.send((what, argument))

    def answers(self) -> None:
        for pipe in self._pipes:
            pipe.recv()

    def _ask(self, what: str, arguments: Sequence[Any] | None = None) -> None:
        self.tell(what, arguments or [None] * len(self))
        self.answers()


class _Model(nn.Module):
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass


def _serve(pipe: Any) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    from actors.gloo_receiver import GlooWeightTransferEngine

    torch.set_num_threads(1)
    engine: Any = GlooWeightTransferEngine(
        WeightTransferConfig(backend="gloo"),
        SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
            model_config=None,
        ),
        torch.device("cpu"),
        _Model(),
    )
    raw: Any = None
    buffers: list[Tensor] = []
    while True:
        try:
            what, argument = pipe.recv()
        except EOFError:
            return
        match what:
            case "init":
                engine.init_transfer_engine(engine.parse_init_info(argument))
            case "start":
                engine.start_weight_update()
            case "update":
                engine.update_weights(argument)
            case "finish":
                engine.finish_weight_update()
            case "join_raw":
                raw = argument[0].join(argument[1])
            case "raw":
                while len(buffers) < 2:  # as many as the weight transfer has
                    buffers.append(torch.zeros(max(argument), dtype=torch.uint8))
                for index, size in enumerate(argument):
                    broadcast(raw, buffers[index % 2][:size])
        pipe.send(None)
