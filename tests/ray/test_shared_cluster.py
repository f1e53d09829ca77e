"""Runs that join a cluster: what its nodes have, what a dead run leaves, how it grows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from shared_cluster import SharedCluster, shared_cluster

SOON_S = 30.0


def answer(driver: subprocess.Popen[str]) -> dict[str, Any]:
    assert driver.stdout
    found: dict[str, Any] = json.loads(driver.stdout.readline())
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """Two nodes without an autoscaler; the second one has another torch."""
    packages = tmp_path_factory.mktemp("packages")
    info = packages / "torch-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9+cpu\n")
    with shared_cluster(cpus=2) as made:
        path = f"{packages}:{made.env['PYTHONPATH']}"
        made.add_node(cpus=0, env={"PYTHONPATH": path})
        yield made


def test_another_version_on_a_node_is_an_error(cluster: SharedCluster) -> None:
    found = answer(cluster.drive("inspect"))
    assert found["autoscaler"] is False
    assert found["error"].startswith("versions differ in the cluster: node 127.0.0.1 (")
    assert ") has torch 9.9.9+cpu, the driver has " in found["error"]
    assert found["error"].count(" has torch ") == 1


def test_stacks_of_an_actor_on_another_node(cluster: SharedCluster, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = answer(cluster.drive("stacks_elsewhere", str(pipe)))
    (line,) = [x for x in found["told"][1].splitlines() if f" pid {found['pid']} " in x]
    log = Path(line.partition(": ")[2])
    deadline = time.monotonic() + SOON_S
    while "in never_ends" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_killed_run_leaves_nothing_and_a_second_one_starts(cluster: SharedCluster) -> None:
    first = cluster.drive("occupy")
    left = [psutil.Process(pid) for pid in answer(first)["pids"]]
    first.send_signal(signal.SIGKILL)
    second = cluster.drive("occupy")  # the same resources, and actors of the same names
    assert len(answer(second)["pids"]) == len(left)
    _, alive = psutil.wait_procs(left, timeout=SOON_S)
    assert not alive
    second.kill()


def test_waits_for_the_nodes_that_an_autoscaler_adds() -> None:
    with shared_cluster(cpus=1, grows_by=2) as cluster:
        told = answer(cluster.drive("grow"))["told"]
    assert told[0].startswith("the run needs 3 CPUs, the cluster has 1:")
    assert told[0].endswith("Waiting for the autoscaler to add nodes (cluster.autoscaler auto)")
    assert told[1].startswith("generator-0 waits to be placed, for ")
    assert ": it needs 2 CPU; the cluster has " in told[1]
