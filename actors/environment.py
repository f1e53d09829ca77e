"""Environment variables of the actors' processes."""

from __future__ import annotations

import sys
from pathlib import Path

from real_ray.placement import Device

_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35)}
"""glibc gives large tensors back to the kernel and gets them again, zeroed page by page, in every
step. On a CPU that takes a tenth of it."""


def engine_env(device: Device) -> dict[str, str]:
    """Environment of a generator's processes."""
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        # Bound threads would fight with the learner's for the same cores.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **_openmp_env(), **_KEEP_FREED_MEMORY}
    return env


def learner_env(device: Device) -> dict[str, str]:
    """Environment of a learner rank."""
    env: dict[str, str] = {"DS_ACCELERATOR": device}
    return env | _openmp_env() | _KEEP_FREED_MEMORY if device == "cpu" else env


def _openmp_env() -> dict[str, str]:
    """Threads that do not spin while they wait: engine and learner share the cores of a machine.

    Intel's OpenMP, which vLLM asks for on x86, comes with vllm-cpu.
    """
    env = {"OMP_WAIT_POLICY": "PASSIVE"}
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists():
        env |= {"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "1"}
    return env
