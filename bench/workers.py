"""A trainer in a process of its own, so that trainers share nothing and memory can be told apart.

A worker waits without using a core, so trainers can take turns on one machine.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batches import Shape, count_tokens, make_batch
from trainers import Kind, Settings, StepInfo, Stopwatch, Trainer, build_trainer, now

from real_ray.types import RolloutGroup

_WARM_UP = Shape(num_groups=1, num_generations=2, prompt_tokens=2, completion_tokens=(2, 2))
_WARM_UP_TOKENS = 1024

RETURN_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "MALLOC_ARENA_MAX": "1",
}
"""Environment in which glibc gives freed tensors back, so that resident memory is what is in use.
It costs time: not for workers whose time is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step."""

    seconds: float
    cpu_seconds: float  # of all threads: what a busy machine changes least
    parts: dict[str, float]  # seconds of forward, backward and update; empty if not asked for
    completion_tokens: int
    sequence_tokens: int
    info: StepInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of one step: resident on CPU, allocated by torch on CUDA; in bytes."""

    before: int  # weights and state of the optimiser; on CPU also libraries
    peak: int  # above that, while the step ran
    info: StepInfo


class Worker:
    """A process that builds a trainer and runs its steps."""

    def __init__(self, kind: Kind, settings: Settings, env: dict[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn)
        with _environment(env):  # the process starts with the first call
            self._started: Future[None] = self._pool.submit(_start, kind, settings)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def timed_step(self, shape: Shape, *, max_tokens: int, parts: bool = False) -> TimedStep:
        """Time a step; with ``parts`` also its parts, which costs a little."""
        found: TimedStep = self._call(_timed_step, shape, max_tokens, parts)
        return found

    def step_memory(self, shape: Shape, *, max_tokens: int) -> StepMemory:
        """Run a step and see how much memory it takes."""
        found: StepMemory = self._call(_step_memory, shape, max_tokens)
        return found

    def peak_memory(self) -> int:
        """Most memory that the process had so far, in bytes."""
        found: int = self._call(_peak_memory)
        return found

    def _call(self, function: Any, *arguments: Any) -> Any:
        self._started.result()
        return self._pool.submit(function, *arguments).result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    settings: Settings
    stopwatch: Stopwatch
    trainer: Trainer
    vocabulary: int

    def batch(self, shape: Shape) -> list[RolloutGroup]:
        return make_batch(shape, vocabulary=self.vocabulary, seed=self.settings.seed)


_state: _State  # of the worker process


def _start(kind: Kind, settings: Settings) -> None:
    global _state  # noqa: PLW0603 - calls of a process pool have nowhere else to find it
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    stopwatch = Stopwatch(settings.device)
    config = AutoConfig.from_pretrained(settings.model)
    _state = _State(
        settings=settings,
        stopwatch=stopwatch,
        trainer=build_trainer(kind, settings, stopwatch),
        vocabulary=config.get_text_config().vocab_size,
    )
    # The optimiser makes its state in its first step.
    _state.trainer.step(_state.batch(_WARM_UP), max_tokens=_WARM_UP_TOKENS)


def _timed_step(shape: Shape, max_tokens: int, parts: bool) -> TimedStep:
    batch, device = _state.batch(shape), _state.settings.device
    _state.stopwatch.seconds.clear()
    _state.stopwatch.on = parts
    cpu_start, start = time.process_time(), now(device)
    info = _state.trainer.step(batch, max_tokens=max_tokens)
    seconds = now(device) - start
    cpu_seconds = time.process_time() - cpu_start
    completion_tokens, sequence_tokens = count_tokens(batch)
    return TimedStep(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        parts=dict(_state.stopwatch.seconds),
        completion_tokens=completion_tokens,
        sequence_tokens=sequence_tokens,
        info=info,
    )


def _step_memory(shape: Shape, max_tokens: int) -> StepMemory:
    batch = _state.batch(shape)
    gc.collect()
    if _state.settings.device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = _resident("VmRSS")
    info = _state.trainer.step(batch, max_tokens=max_tokens)
    return StepMemory(before=before, peak=_peak_memory() - before, info=info)


def _peak_memory() -> int:
    if _state.settings.device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return _resident("VmHWM")


def _resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kilobytes) * 1024


@contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= env
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
