"""The Ray cluster of a run: one that is there, or one that is started for it and goes with it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from actors.node import LOOPBACK, num_cores
from real_ray.config import ClusterConfig
from real_ray.errors import ResourceError

_SOCKET_ROOM = 40  # characters of a temporary directory that still leave room for Ray's sockets
_EXIT_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that this process is connected to."""

    is_local: bool
    nodes: tuple[Mapping[str, float], ...]  # resources of each living node
    env: Mapping[str, str]  # for all actors of the run

    @property
    def has_gpus(self) -> bool:
        return any(node.get("GPU", 0) > 0 for node in self.nodes)


def address_of(config: ClusterConfig) -> str | None:
    """Address of the cluster to join; None: start one on this machine."""
    if config.address == "auto":
        return os.environ.get("RAY_ADDRESS") or None
    return None if config.address == "local" else config.address


def this_machine(config: ClusterConfig) -> Mapping[str, float]:
    """CPUs that a Ray started here would have."""
    return {"CPU": float(config.num_cpus or num_cores())}


@contextlib.contextmanager
def connect(config: ClusterConfig, *, logs: Path | None) -> Iterator[Cluster]:
    """Join or start Ray; at the end leave it, or stop it and all of its processes.

    Args:
        logs: where the logs of a local Ray are kept when it stops; None: nowhere.

    Raises:
        ResourceError: the cluster cannot be reached, or Ray does not start.
    """
    # A failed call fails all of its references. The first one is reported, by us, in one message.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    address = address_of(config)
    if address is not None:
        with _joined(address) as cluster:
            yield cluster
    else:
        with _started(config, logs) as cluster:
            yield cluster


@contextlib.contextmanager
def _joined(address: str) -> Iterator[Cluster]:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"cluster.address: no Ray cluster answers at {address}: {error}. Start one "
            "(`ray start --head`), use --cluster.address local, or set RAY_AUTH_MODE=token if the "
            "cluster wants a token"
        ) from error
    try:
        yield Cluster(is_local=False, nodes=_nodes(ray), env={})
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _started(config: ClusterConfig, logs: Path | None) -> Iterator[Cluster]:
    # Read when ray is imported: everything on one machine, so nothing but loopback is needed.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    root = tempfile.gettempdir()
    place = Path(
        tempfile.mkdtemp(prefix="real-ray-", dir=root if len(root) < _SOCKET_ROOM else "/tmp")
    )
    scratch = place / "tmp"
    scratch.mkdir()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        ray.init(
            address="local",
            num_cpus=int(this_machine(config)["CPU"]),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(place / "ray"),
        )
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        shutil.rmtree(place, ignore_errors=True)
        raise ResourceError(f"Ray does not start on this machine: {error}") from error
    try:
        yield Cluster(
            is_local=True,
            nodes=_nodes(ray),
            env={
                "TMPDIR": str(scratch),
                "VLLM_HOST_IP": LOOPBACK,
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
            },
        )
    finally:
        started = [
            child for child in psutil.Process().children(recursive=True) if child.pid not in others
        ]
        ray.shutdown()
        _wait_or_kill(started)
        if logs is not None:
            _keep_logs(place / "ray", logs)
        shutil.rmtree(place, ignore_errors=True)


def _nodes(ray: Any) -> tuple[Mapping[str, float], ...]:
    return tuple(node["Resources"] for node in ray.nodes() if node["Alive"])


def _wait_or_kill(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_EXIT_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_EXIT_SECONDS)


def _keep_logs(ray_place: Path, logs: Path) -> None:
    """Copy what the actors printed; the rest of Ray's logs goes with its directory."""
    for file in sorted(ray_place.glob("session_2*/logs/worker-*.*")):
        if file.stat().st_size:
            with contextlib.suppress(OSError):
                shutil.copy(file, logs / file.name)
