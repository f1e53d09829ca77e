"""What is measured: one optimiser step of the learner, or of a plain Hugging Face loop."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from real_ray.batching import Layout
from real_ray.types import RolloutGroup

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]
Kind = Literal["plain", "padded", "packed", "shared_prefix"]
"""The plain loop, or the learner with this layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all trainers of a comparison have in common. The numbers are those of the demo."""

    model: str  # directory or hub name
    device: Device
    dtype: Dtype
    seed: int
    learning_rate: float = 2e-5
    max_grad_norm: float = 1.0
    temperature: float = 0.6
    tau: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What a trainer says about a step; equal for trainers that do the same."""

    grad_norm: float  # before clipping
    num_microbatches: int
    num_score_passes: int


class Trainer(Protocol):
    """Does an optimiser step on a batch, in micro-batches of at most ``max_tokens``."""

    def step(self, batch: list[RolloutGroup], *, max_tokens: int) -> StepInfo: ...


class Stopwatch:
    """Seconds by part of a step. It waits for the device around each part, so it is off at first.

    Parts do not nest.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.on = False
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self.on:
            yield
            return
        start = now(self._device)
        yield
        self.seconds[name] += now(self._device) - start

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, as a part of this name."""

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*arguments, **options)

        return timed


def now(device: Device) -> float:
    """Seconds of the clock, when the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def build_trainer(kind: Kind, settings: Settings, stopwatch: Stopwatch) -> Trainer:
    """Load the model and set up the optimiser."""
    if kind == "plain":
        from plain_loop import PlainLoop

        return PlainLoop(settings, stopwatch)
    return Learner(settings, stopwatch, layout=kind)


class Learner:
    """`LearnerActor` as the only rank, in this process."""

    def __init__(self, settings: Settings, stopwatch: Stopwatch, *, layout: Layout) -> None:
        from deepspeed import DeepSpeedEngine

        from actors.learner import LearnerActor
        from actors.node import LOOPBACK, free_port
        from actors.protocol import LearnerSpec
        from real_ray.config import LearnerConfig, LossConfig
        from real_ray.config.deepspeed_json import deepspeed_config

        for method, part in (("forward", "forward"), ("backward", "backward"), ("step", "update")):
            original = getattr(DeepSpeedEngine, method)
            setattr(DeepSpeedEngine, method, stopwatch.around(part, original))
        self._config = LearnerConfig(
            learning_rate=settings.learning_rate,
            max_grad_norm=settings.max_grad_norm,
            dtype=settings.dtype,
            packing=layout != "padded",
            share_prefix=layout == "shared_prefix",
        )
        self._loss = LossConfig(tau=settings.tau)
        self._directory = tempfile.TemporaryDirectory()  # of reports on steps that fail
        self._learner = LearnerActor(
            LearnerSpec(
                rank=0,
                world_size=1,
                model=settings.model,
                trust_remote_code=False,
                device=settings.device,
                seed=settings.seed,
                num_threads=0,
                num_steps=1,
                temperature=settings.temperature,
                run_directory=self._directory.name,
                config=self._config,
                loss=self._loss,
                deepspeed=deepspeed_config(self._config),
            )
        )
        self._learner.start(LOOPBACK, free_port(LOOPBACK))

    def step(self, batch: list[RolloutGroup], *, max_tokens: int) -> StepInfo:
        from batches import ticket_of

        from actors.requests import rank_work

        (work,) = rank_work(
            [ticket_of(group) for group in batch],
            learner=self._config.model_copy(update={"max_tokens_per_microbatch": max_tokens}),
            loss=self._loss,
            policy_version=1,
        )
        trained = self._learner.train(work.request, *(batch[index] for index in work.groups))
        metrics = trained.metrics.values()
        return StepInfo(
            grad_norm=metrics["policy/grad_norm"],
            num_microbatches=int(metrics["learner/microbatches"]),
            num_score_passes=int(metrics["learner/score_passes"]),
        )
