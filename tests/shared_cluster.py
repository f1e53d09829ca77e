"""A Ray cluster that drivers join, as several people share one, with nodes of this machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from actors.node import LOOPBACK, free_port

HERE = Path(__file__).parent
# As Ray's fake node provider calls them.
HEAD_ID = "f" * 51 + "00000"
HEAD_TYPE = "ray.head.default"
START_S = 60.0


class SharedCluster:
    """Nodes of some CPUs; what it starts listens on loopback only.

    Args:
        grows_by: CPUs of a node that an autoscaler may add; None: there is no autoscaler.
    """

    def __init__(self, place: Path, *, cpus: int, grows_by: int | None = None) -> None:
        self._place = place
        self._started: list[subprocess.Popen[str]] = []
        self.address = f"{LOOPBACK}:{free_port(LOOPBACK)}"
        self.env = {
            **os.environ,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all on loopback
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ADDRESS": self.address,
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
        }
        extra, env = ["--temp-dir", str(place)], {}
        if grows_by is not None:
            config = place / "autoscaler.json"
            config.write_text(json.dumps(self._autoscaler(cpus, grows_by)))
            extra += ["--autoscaling-config", str(config)]
            env = {
                "RAY_FAKE_CLUSTER": "1",
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            }
        port = self.address.partition(":")[2]
        client = str(free_port(LOOPBACK))
        self._start(
            cpus, ["--head", "--port", port, "--ray-client-server-port", client, *extra], env
        )

    def add_node(self, *, cpus: int, env: Mapping[str, str]) -> None:
        # `ray start` refuses a second node on loopback.
        node = self.drive("be_a_node", self.address, str(cpus), env=env)
        assert node.stdout
        assert node.stdout.readline()

    def drive(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a driver: a function of `cluster_drivers`, which prints what it finds."""
        driver = subprocess.Popen(
            [sys.executable, str(HERE / "cluster_drivers.py"), name, *arguments],
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(driver)
        return driver

    def stop(self) -> None:
        """End every process of the cluster and its drivers."""
        alive = [process for process in self._started if process.poll() is None]
        everyone = [psutil.Process(process.pid) for process in alive]
        everyone += [child for one in everyone for child in one.children(recursive=True)]
        for process in everyone:
            if process.is_running():
                process.kill()
        psutil.wait_procs(everyone, timeout=START_S)
        for started in self._started:
            started.wait()
            if started.stdout:
                started.stdout.close()

    def _start(self, cpus: int, arguments: list[str], env: Mapping[str, str]) -> None:
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", *arguments]
        command += ["--num-cpus", str(cpus), "--node-ip-address", LOOPBACK]
        command += ["--dashboard-agent-listen-port", str(free_port(LOOPBACK))]
        command += ["--object-store-memory", str(10**8)]
        process = subprocess.Popen(
            command,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        assert process.stdout
        told = []
        for line in process.stdout:
            told.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError("".join(told))

    def _autoscaler(self, cpus: int, grows_by: int) -> Mapping[str, Any]:
        def node(cpus: int, most: int) -> Mapping[str, Any]:
            return {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": most}

        lists = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray"]
        return {
            "cluster_name": "fake",
            "max_workers": 1,
            "idle_timeout_minutes": 10,
            "provider": {
                "type": "fake_multinode",
                "head_node_id": HEAD_ID,
                "gcs_address": self.address,
            },
            "available_node_types": {HEAD_TYPE: node(cpus, 0), "larger": node(grows_by, 1)},
            "head_node_type": HEAD_TYPE,
            **{f"{name}_commands": [] for name in [*lists, "worker_start_ray"]},
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            "file_mounts_sync_continuously": False,
        }


@contextmanager
def shared_cluster(*, cpus: int, grows_by: int | None = None) -> Iterator[SharedCluster]:
    # Not pytest's temporary directory: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as place:
        cluster = SharedCluster(Path(place), cpus=cpus, grows_by=grows_by)
        try:
            yield cluster
        finally:
            cluster.stop()
