"""Ranks of a real learner on a tiny model, which start over with each configuration of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray
from groups import ticket_of
from local_ray import local_ray
from recording_learner import Gradients, RecordingLearner

from actors.learner_group import RayLearnerGroup
from actors.node import LOOPBACK, free_port
from actors.protocol import LearnerSpec, TrainedBatch
from actors.requests import rank_work
from real_ray.checkpoint import DriverState
from real_ray.config import LearnerConfig, LossConfig
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.partial_metrics import PartialMetrics
from real_ray.types import RolloutGroup, SampleRecord

TEMPERATURE = 0.6


class LearnerRanks:
    """Processes that stay; `configure` builds model, engine and optimiser anew in all of them."""

    def __init__(self, num_ranks: int, model: Path, run_directory: Path) -> None:
        self._model = model
        self._run_directory = run_directory
        self.config = LearnerConfig(num_ranks=num_ranks)
        self.loss = LossConfig()
        self.ranks = [
            ray.remote(RecordingLearner).options(num_cpus=0.5).remote(self._spec(rank))
            for rank in range(num_ranks)
        ]
        port = free_port(LOOPBACK)
        self.call("start", LOOPBACK, port)

    def configure(
        self, *, loss: LossConfig | None = None, checkpoint: Path | None = None, **learner: Any
    ) -> int | None:
        """Start over, from the model or a checkpoint; return the version of that."""
        settings = {"dtype": "float32", "max_grad_norm": 1e9, "learning_rate": 1e-3} | learner
        self.config = LearnerConfig(num_ranks=len(self.ranks), timeout_s=120.0, **settings)
        self.loss = loss or LossConfig()
        path = None if checkpoint is None else str(checkpoint)
        versions: list[int | None] = ray.get(
            [rank.restart.remote(self._spec(index), path) for index, rank in enumerate(self.ranks)],
            timeout=180,
        )
        return versions[0]

    def train(self, groups: Sequence[RolloutGroup], *, policy_version: int = 1) -> dict[str, float]:
        """Metrics of the step on these groups; records and warnings are kept."""
        work = rank_work(
            [ticket_of(group) for group in groups],
            learner=self.config,
            loss=self.loss,
            policy_version=policy_version,
        )
        parts: list[TrainedBatch] = ray.get(
            [
                rank.train.remote(its.request, *(groups[i] for i in its.groups))
                for rank, its in zip(self.ranks, work, strict=True)
            ],
            timeout=180,
        )
        self.samples: list[SampleRecord] = [s for part in parts for s in part.samples]
        self.warnings = parts[0].warnings
        assert all(part.warnings == self.warnings for part in parts)
        self.learning_rate = parts[0].learning_rate
        return PartialMetrics.merge(part.metrics for part in parts).values()

    def save_checkpoint(self, directory: Path, state: DriverState) -> None:
        """As the driver has it saved."""
        group = learner_group(self.ranks, config=self.config, loss=self.loss)
        asyncio.run(group.save_checkpoint(str(directory), state))

    def gradients(self) -> list[Gradients]:
        """Of each optimiser step since `configure`."""
        result: list[Gradients] = self.call("gradients")[0]
        return result

    def parameters(self) -> dict[str, np.ndarray]:
        """Current full values by Hugging Face name."""
        result: dict[str, np.ndarray] = self.call("parameters")[0]
        return result

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks together."""
        found: list[Any] = ray.get(
            [getattr(rank, method).remote(*arguments) for rank in self.ranks], timeout=180
        )
        return found

    def _spec(self, rank: int) -> LearnerSpec:
        return LearnerSpec(
            rank=rank,
            world_size=self.config.num_ranks,
            model=str(self._model),
            trust_remote_code=False,
            device="cpu",
            seed=0,
            num_threads=1,
            num_steps=10,
            temperature=TEMPERATURE,
            run_directory=str(self._run_directory),
            config=self.config,
            loss=self.loss,
            deepspeed=deepspeed_config(self.config),
        )


def learner_group(
    ranks: Sequence[Any], *, config: LearnerConfig, loss: LossConfig
) -> RayLearnerGroup:
    """Ranks that send their weights to nobody."""

    async def no_rendezvous(_: int) -> NoReturn:
        raise AssertionError

    return RayLearnerGroup(ranks, config=config, loss=loss, rendezvous=no_rendezvous)


@contextmanager
def two_sizes_of_learner(model: Path, run_directory: Path) -> Iterator[dict[int, LearnerRanks]]:
    """A learner of one rank and one of two, on a Ray of their own."""
    env = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(__file__).parent),  # where the actor's class is
    }
    with local_ray(env):
        learners = {size: LearnerRanks(size, model, run_directory) for size in (1, 2)}
        yield learners
        for learner in learners.values():
            for rank in learner.ranks:
                ray.kill(rank)
