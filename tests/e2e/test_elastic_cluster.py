"""Nodes that join and leave under a running training."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio
from fakes import RecordingTracker
from ray.cluster_utils import Cluster
from tiny_engine import PacedGenerator
from tiny_model import build_model

from actors.cluster import connect
from actors.fleet import Fleet
from real_ray.checkpoint import DriverState
from real_ray.config import Config
from real_ray.data import load_prompts, load_tokenizer
from real_ray.driver import Driver
from real_ray.placement import plan_placement
from real_ray.roles import LearnerGroup
from real_ray.types import RolloutTicket, TrainResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

WHO_MAY_WAIT_S = 120.0


def make_config(model: Path, address: str) -> Config:
    return Config.model_validate(
        {
            "run": {"num_steps": 10_000},
            "model": {"name_or_path": str(model)},
            "data": {"train": "arithmetic", "max_prompt_length": 100},
            "rollout": {
                "num_generations": 4,
                "max_completion_length": 16,
                "min_generators": 1,
                "num_generators": 1,
                "max_generators": 3,
                "cpu_kv_cache_gib": 0.25,
                "num_threads": 1,
                "stall_s": 60.0,
                "max_retries": 10,
            },
            "reward": {"function": "reward_functions:even_length", "cpus_per_worker": 0.25},
            "learner": {"cpus_per_rank": 0.5, "num_threads": 1, "prompts_per_step": 6},
            "sync": {"timeout_s": 30.0},
            "cluster": {"address": address, "device": "cpu"},
        }
    )


@dataclass
class Watching(RecordingTracker):
    """Wakes a test whenever something happened."""

    counts: Mapping[str, int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def generators(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(counts)
        self.changed.set()

    def step(self, metrics: Any, samples: Any) -> None:
        super().step(metrics, samples)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WHO_MAY_WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def next_steps(self, count: int) -> list[dict[str, float]]:
        """The first of them began before, and is left out."""
        done = len(self.steps)
        await self.until(lambda: len(self.steps) > done + count)
        return self.steps[done + 1 : done + 1 + count]


@dataclass
class Seen:
    """A learner, and which generators made the groups of each step."""

    learner: LearnerGroup
    made_by: list[set[str]] = field(default_factory=list)

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        self.made_by.append({group.sampled.generator for group in groups})
        return await self.learner.train(groups, policy_version=policy_version)

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        await self.learner.save_checkpoint(directory, state)


@dataclass(frozen=True, kw_only=True)
class Running:
    cluster: Cluster
    tracker: Watching
    learner: Seen
    driver: Driver
    task: asyncio.Task[bool]


@pytest_asyncio.fixture(loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the workers
    model = build_model(tmp_path_factory.mktemp("tiny"))
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)  # where `Cluster` notes its address
        (Path(place) / "ray").mkdir()
        head = {"num_cpus": 2, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            config = make_config(model, cluster.address)
            prompts = load_prompts(config.data, load_tokenizer(config.model), split="train", seed=0)
            tracker = Watching()
            with connect(config.cluster, logs=None) as joined:
                fleet = Fleet(
                    config,
                    plan_placement(config, "cpu"),
                    joined,
                    "cpu",
                    tracker=tracker,
                    generator=PacedGenerator,
                )
                try:
                    roles = await fleet.start(probe=prompts[0])
                    learner = Seen(roles.learner)
                    driver = Driver(
                        config,
                        roles=dataclasses.replace(roles, learner=learner),  # type: ignore[arg-type]
                        train=prompts,
                        evaluation=[],
                        tracker=tracker,
                    )
                    task = asyncio.create_task(driver.run())
                    yield Running(
                        cluster=cluster, tracker=tracker, learner=learner, driver=driver, task=task
                    )
                    driver.stop(grace_s=0.0)
                    await task
                finally:
                    await fleet.stop()
        finally:
            cluster.shutdown()


async def test_generators_come_with_nodes_and_go_with_them_and_no_group_is_lost(
    running: Running,
) -> None:
    it, tracker = running, running.tracker
    seconds, made_by = {}, {}
    nodes: list[Any] = []
    for number in (1, 3, 2):
        if number == 3:
            nodes = [it.cluster.add_node(num_cpus=1) for _ in range(2)]
        if number == 2:
            it.cluster.remove_node(nodes[0], allow_graceful=False)
            await tracker.until(lambda: tracker.counts["ready"] == 2)
        await tracker.until(lambda: tracker.counts["ready"] == number)  # noqa: B023
        await tracker.next_steps(1)  # made by those before, in part
        steps = await tracker.next_steps(3)
        assert {step["rollout/generators"] for step in steps} == {number}
        made_by[number] = set().union(*it.learner.made_by[-3:])
        seconds[number] = fmean(step["time/step"] for step in steps)
        assert not it.task.done()
    assert made_by[1] == {"generator-0"}
    assert made_by[3] == {"generator-0", "generator-1", "generator-2"}
    assert len(made_by[2]) == 2
    # Six groups a step, one after another in each generator.
    assert seconds[1] > seconds[3], "throughput follows the number of generators"
    it.driver.stop(grace_s=30.0)
    assert await it.task is False
    ledger = dict(tracker.ledgers[-1])
    assert ledger.pop("drawn") == sum(ledger.values())
    assert ledger["failed"] == ledger["in flight"] == 0
    assert ledger["trained"] == 6 * len(tracker.steps)
    assert max(step["async/staleness_max"] for step in tracker.steps) <= 1
    assert [kind for kind, _ in tracker.events if kind == "generator lost"] == ["generator lost"]
