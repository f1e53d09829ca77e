"""Groups that are on a node when it is lost."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from fakes import sampled_ticket
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.reward_pool import RayRewardPool
from real_ray.activity import Activity
from real_ray.errors import GroupLostError
from real_ray.tracking import Tracker

LARGE = 2**20  # bytes, more than Ray puts into an answer


class Scorer:
    def score(self, group: np.ndarray) -> tuple[tuple[list[float], float], np.ndarray]:
        return ([1.0, 0.0], 0.1), group + 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)  # where `Cluster` notes its address
        here = Path(__file__).parent
        monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}")
        (Path(place) / "ray").mkdir()
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def on(node: Any, actor: type) -> Any:
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return ray.remote(actor).options(num_cpus=0, scheduling_strategy=there)


def pool_on(node: Any) -> RayRewardPool:
    return RayRewardPool(
        lambda index: on(node, Scorer).remote(),
        num_workers=1,
        function="f",
        timeout_s=30.0,
        activity=Activity(),
        tracker=Tracker(),
        keeps_copies=True,
    )


async def test_a_scored_group_outlives_the_node_that_it_was_scored_on(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=1)
    group = ray.put(np.zeros(LARGE, dtype=np.uint8))
    ticket = dataclasses.replace(sampled_ticket("a"), ref=group)
    scored = await pool_on(node).score(ticket)
    cluster.remove_node(node, allow_graceful=False)
    assert (await scored.ref).sum() == LARGE


async def test_completions_that_went_with_their_node_are_no_fault_of_the_reward_worker(
    cluster: Cluster,
) -> None:
    class Sampler:
        def sample(self) -> np.ndarray:
            return np.zeros(LARGE, dtype=np.uint8)

    node = cluster.add_node(num_cpus=1)
    pool = pool_on(cluster.head_node)
    sampler = on(node, Sampler).remote()
    group = sampler.sample.remote()
    ray.wait([group], fetch_local=False)
    worker = pool.workers[0]
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(GroupLostError, match=r"^reward-0: "):
        await pool.score(dataclasses.replace(sampled_ticket("a"), ref=group))
    ticket = dataclasses.replace(sampled_ticket("b"), ref=ray.put(np.zeros(2)))
    assert (await pool.score(ticket)).rewards == (1.0, 0.0)
    assert pool.workers[0] is worker
