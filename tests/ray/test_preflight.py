"""Placement, versions and stacks on a real Ray of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from local_ray import local_ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.preflight import check_capacity, check_versions, placed
from actors.stacks import enable_stacks, stacks_on_signal
from real_ray.errors import ResourceError
from real_ray.placement import Bundle, Placement

CHILD = "from actors.stacks import enable_stacks; enable_stacks(); print(1, flush=True); input()"
SOON_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = Path(__file__).parent  # where `Stuck` is, and what this file imports
    with local_ray({"PYTHONPATH": f"{here}:{here.parent}"}):
        yield


@pytest.fixture
async def full() -> AsyncIterator[PlacementGroup]:
    """A group that has all CPUs."""
    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    await group.ready()
    yield group
    remove_placement_group(group)


class Stuck:
    """Prints its stacks on request, as do some of its children."""

    def __init__(self) -> None:
        enable_stacks()
        self.asked, self.unasked = (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for command in ([sys.executable, "-c", CHILD], ["cat"])
        )

    def pids(self) -> list[int]:
        assert self.asked.stdout
        self.asked.stdout.readline()
        return [os.getpid(), self.asked.pid, self.unasked.pid]

    def never_ends(self, pipe: str) -> None:
        Path(pipe).write_text("here")
        threading.Event().wait()


def make_placement(cpus: float) -> Placement:
    def bundle(actor: str, cpus: float) -> tuple[Bundle, ...]:
        return (Bundle(actor=actor, cpus=cpus, gpus=0),)

    return Placement(
        generators=bundle("generator-0", cpus),
        learner=bundle("learner-0", 0.5),
        rewards=bundle("reward-0", 0.5),
    )


def read(log: Path) -> str:
    return log.read_text()


class TestPlaced:
    async def test_what_fits_is_placed_without_a_word(self) -> None:
        told: list[str] = []
        group = placement_group([{"CPU": 1}, {"CPU": 1}])
        await placed(group, what="learner", timeout_s=60, tell=told.append)
        remove_placement_group(group)
        assert told == []

    @pytest.mark.parametrize(("timeout_s", "bound"), [(60.0, " of at most 60 s"), (None, "")])
    async def test_tells_what_is_awaited_until_it_is_there(
        self, full: PlacementGroup, timeout_s: float | None, bound: str
    ) -> None:
        told: list[str] = []
        times: list[float] = []
        clock = asyncio.get_running_loop().time

        def tell(text: str) -> None:
            told.append(text)
            times.append(clock())
            if len(told) == 3:
                remove_placement_group(full)

        group = placement_group([{"CPU": 2}])
        began = clock()
        await placed(group, what="generator-1", timeout_s=timeout_s, tell=tell, every_s=0.5)
        remove_placement_group(group)
        assert 2.0 <= times[2] - began < 3.5  # after 1 s, and then every 0.5 s
        assert told[0] == (
            f"generator-1 waits to be placed, for 1 s{bound}: it needs 2 CPU; the cluster "
            "has 2 CPU, free are 0 CPU; short of CPU: 2 too few are free"
        )

    async def test_many_wait_at_once_up_to_the_deadline(self, full: PlacementGroup) -> None:
        groups = [placement_group([{"CPU": 1, "GPU": 1}]) for _ in range(20)]
        told: list[str] = []
        began = time.monotonic()
        ends = await asyncio.gather(
            *(
                placed(group, what=f"generator-{i}", timeout_s=2, tell=told.append)
                for i, group in enumerate(groups)
            ),
            return_exceptions=True,
        )
        assert time.monotonic() - began < 20 * 2 / 2
        for group in groups:
            remove_placement_group(group)
        assert sorted(text.split()[0] for text in told) == sorted(
            f"generator-{i}" for i in range(20)
        )
        for i, end in enumerate(ends):
            assert isinstance(end, ResourceError)
            assert str(end) == (
                f"generator-{i} was not placed within 2 s (cluster.start_timeout_s): it needs "
                "1 CPU, 1 GPU; the cluster has 2 CPU, free are 0 CPU, 0 GPU; short of CPU: 1 too "
                "few are free, GPU: 1 more than there are. Lower what the run needs, add nodes, or "
                "wait for other jobs to end"
            )


class TestCapacity:
    NODES = ({"CPU": 2.0},)

    def test_what_fits_is_not_spoken_of(self) -> None:
        told: list[str] = []
        check_capacity(make_placement(1), self.NODES, autoscaler="auto", tell=told.append)
        assert told == []

    @pytest.mark.parametrize("autoscaler", ["auto", "no"])
    def test_without_an_autoscaler_it_is_refused_at_once(self, autoscaler: str) -> None:
        with pytest.raises(ResourceError, match=r"needs 4 CPUs, the cluster has 2.*No autoscaler"):
            check_capacity(make_placement(3), self.NODES, autoscaler=autoscaler, tell=print)

    def test_with_one_it_is_told(self) -> None:
        told: list[str] = []
        check_capacity(make_placement(3), self.NODES, autoscaler="yes", tell=told.append)
        (text,) = told
        assert "needs 4 CPUs, the cluster has 2" in text
        assert text.endswith("Waiting for the autoscaler to add nodes (cluster.autoscaler yes)")


def test_the_versions_of_one_environment_agree() -> None:
    check_versions(timeout_s=60)


async def test_sigusr1_prints_the_stacks_of_a_stuck_actor(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    actor = ray.remote(Stuck).remote()
    pids = await actor.pids.remote()
    actor.never_ends.remote(str(pipe))
    assert await asyncio.to_thread(pipe.read_text) == "here"
    told: asyncio.Queue[str] = asyncio.Queue()

    async def waits_here() -> None:
        await asyncio.Event().wait()

    with stacks_on_signal(table=lambda: "the table", tell=told.put_nowait):
        waiting = asyncio.create_task(waits_here(), name="a task")
        os.kill(os.getpid(), signal.SIGUSR1)
        driver = await asyncio.wait_for(told.get(), SOON_S)
        actors = await asyncio.wait_for(told.get(), SOON_S)
        waiting.cancel()
    assert driver.startswith("the table\n")
    assert "a task:\n" in driver
    task = driver[driver.index("a task:\n") :].splitlines()
    assert task[1].endswith("waits_here")
    assert f"{Path(__file__)}:" in task[1]
    assert task[2].endswith("in Event.wait")
    lines = {pid: [x for x in actors.splitlines() if f" pid {pid} " in x] for pid in pids}
    assert [len(lines[pid]) for pid in pids] == [1, 1, 0]
    log = Path(lines[pids[0]][0].partition(": ")[2])
    deadline = time.monotonic() + SOON_S
    while not ("in never_ends" in (text := read(log)) and '"<string>"' in text):
        assert time.monotonic() < deadline, text
        await asyncio.sleep(0.1)
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    ray.kill(actor)
