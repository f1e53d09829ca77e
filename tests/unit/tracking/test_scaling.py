"""Asking a run for another number of generators."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes import RecordingTracker

from real_ray.errors import ConfigError
from real_ray.tracking.scaling import FILE, ask_for, follow_requests, newest_request


class Pool:
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.changed = asyncio.Event()

    def scale(self, num_generators: int) -> None:
        self.asked.append(num_generators)
        self.changed.set()
        if num_generators > 4:
            raise ConfigError(f"cannot scale to {num_generators} generators")


async def followed(directory: Path, requests: list[int]) -> tuple[Pool, RecordingTracker]:
    pool, tracker = Pool(), RecordingTracker()
    task = asyncio.create_task(follow_requests(directory, pool, tracker))
    for number in requests:
        pool.changed.clear()
        ask_for(directory, number)
        await asyncio.wait_for(pool.changed.wait(), 10)
    task.cancel()
    return pool, tracker


async def test_each_request_is_followed_once_also_the_same_one_again(tmp_path: Path) -> None:
    pool, tracker = await followed(tmp_path, [3, 3, 1])
    assert pool.asked == [3, 3, 1]
    assert tracker.events == [
        ("scaled", "3 generators are wanted"),
        ("scaled", "3 generators are wanted"),
        ("scaled", "1 generators are wanted"),
    ]


async def test_what_is_refused_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    pool, tracker = await followed(tmp_path, [5, 2])
    assert pool.asked == [5, 2]
    assert tracker.events[0] == ("scaling refused", "cannot scale to 5 generators")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not JSON", b"\xff"])
def test_anything_else_is_no_request(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    assert newest_request(tmp_path) is None
