"""Drivers that join a shared cluster: ``python cluster_drivers.py NAME ...``; each prints JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.preflight import check_capacity, check_versions, has_autoscaler, placed
from actors.stacks import dump, enable_stacks
from real_ray.errors import ResourceError
from real_ray.placement import Bundle, Placement

GROUPS = [[{"CPU": 1.0}], [{"CPU": 0.5}, {"CPU": 0.5}]]


class Worker:
    """Stands for any actor of a run, with a process of its own as an engine has them."""

    def __init__(self) -> None:
        enable_stacks()
        self._child = subprocess.Popen(["sleep", "1000"])

    def pids(self) -> list[int]:
        return [os.getpid(), self._child.pid]

    def never_ends(self, pipe: str) -> None:
        Path(pipe).write_text("here")
        threading.Event().wait()


def say(**values: object) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


async def occupy() -> None:
    """Reserve everything and start actors, as `Fleet` does; then wait to be killed."""
    groups = [placement_group(bundles, strategy="PACK") for bundles in GROUPS]
    told: list[str] = []
    await asyncio.gather(
        *(placed(group, what="group", timeout_s=60, tell=told.append) for group in groups)
    )
    workers = [
        ray.remote(Worker)
        .options(
            name=f"worker-{number}-{index}",
            num_cpus=bundle["CPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        )
        .remote()
        for number, (group, bundles) in enumerate(zip(groups, GROUPS, strict=True))
        for index, bundle in enumerate(bundles)
    ]
    pids = await asyncio.gather(*(worker.pids.remote() for worker in workers))
    say(pids=list(itertools.chain(*pids)), told=told)
    await asyncio.Event().wait()


async def grow() -> None:
    """Ask for more than there is, on a cluster that grows."""
    told: list[str] = []

    def bundle(name: str, cpus: float) -> tuple[Bundle, ...]:
        return (Bundle(actor=name, cpus=cpus, gpus=0),)

    check_capacity(
        Placement(
            generators=bundle("generator-0", 2.0),
            learner=bundle("learner-0", 0.5),
            rewards=bundle("reward-0", 0.5),
        ),
        [node["Resources"] for node in ray.nodes()],
        autoscaler="auto",
        tell=told.append,
    )
    group = placement_group([{"CPU": 2.0}])
    await placed(group, what="generator-0", timeout_s=300, tell=told.append)
    say(told=told)


async def inspect() -> None:
    """Whether the nodes agree and an autoscaler is there."""
    try:
        check_versions(timeout_s=60)
    except ResourceError as error:
        say(autoscaler=has_autoscaler(), error=str(error))


async def be_a_node(address: str, cpus: str) -> None:
    """No driver but one more node of the cluster, started as Ray's fake autoscaler does it."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        gcs_address=address,
        redis_address=address,
        num_cpus=int(cpus),
        object_store_memory=10**8,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
    )
    Node(parameters, head=False, spawn_reaper=False)
    say(started=True)
    await asyncio.Event().wait()


async def stacks_elsewhere(pipe: str) -> None:
    """Stacks of an actor that is stuck on another node."""
    here = ray.get_runtime_context().get_node_id()
    (elsewhere,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {here}
    there = NodeAffinitySchedulingStrategy(elsewhere, soft=False)
    worker = ray.remote(Worker).options(num_cpus=0, scheduling_strategy=there).remote()
    pid, _ = await worker.pids.remote()
    worker.never_ends.remote(pipe)
    assert Path(pipe).read_text() == "here"  # noqa: ASYNC240
    told: list[str] = []
    await dump(table=lambda: "the table", tell=told.append)
    say(pid=pid, told=told)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    drivers: dict[str, Callable[..., object]] = {
        "occupy": occupy,
        "grow": grow,
        "inspect": inspect,
        "be_a_node": be_a_node,
        "stacks_elsewhere": stacks_elsewhere,
    }
    if name != "be_a_node":
        ray.init(log_to_driver=False, logging_level="ERROR")
    asyncio.run(drivers[name](*arguments))
