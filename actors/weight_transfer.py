"""Weight transfer over gloo, for machines without GPUs: a vLLM plugin.

vLLM's own back ends (`nccl`, ...) all need GPUs. This one stands behind the same two base
classes (`vllm.distributed.weight_transfer.base`), so a CPU run takes the code path of a GPU run
and only the back end's name differs. One process group holds the sending learner rank (rank 0)
and every worker of every generator.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal

from vllm.distributed.weight_transfer import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from actors import float_head
from actors.gloo_receiver import GlooWeightTransferEngine
from actors.gloo_sender import BACKEND, GlooTrainerWeightTransferEngine
from actors.stacks import enable_stacks


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every vLLM process, possibly repeatedly."""
    _die_with_parent()
    if multiprocessing.parent_process() is not None:
        enable_stacks()
    # vLLM refuses to register a name twice, and its registry cannot be asked.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerWeightTransferEngine)
    float_head.register()


def _die_with_parent() -> None:
    """Let the kernel end this engine process when the process that started it dies.

    A killed generator actor would otherwise leave its EngineCore and Worker behind, holding
    the model's memory.
    """
    if multiprocessing.parent_process() is None:
        return  # not a child of an engine
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
