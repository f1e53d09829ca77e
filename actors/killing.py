"""How actors are ended that may not react any more."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def kill(actor: Any) -> None:
    """End an actor's process, also one that is stopped or hangs in native code.

    `ray.kill` asks the process to exit. One that does not hear that keeps its memory and its GPU.
    """
    info = ray._private.state.actors(actor_id=actor._actor_id.hex())
    if info and info["State"] == "ALIVE":
        node, pid = info["Address"]["NodeID"], info["Pid"]
        if node == ray.get_runtime_context().get_node_id():
            kill_worker(pid)
        elif any(n["NodeID"] == node and n["Alive"] for n in ray.nodes()):
            ray.remote(kill_worker).options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(pid)
    ray.kill(actor)


def kill_worker(pid: int) -> None:
    """Kill a process of this machine, if it is an actor's."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        title = "".join(psutil.Process(pid).cmdline()[:1])
        if title.startswith("ray::"):  # not one that has its number now
            os.kill(pid, signal.SIGKILL)
