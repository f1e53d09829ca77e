"""The file by which `real-ray scale` asks a run for another number of generators."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from real_ray.errors import ConfigError
from real_ray.tracking.base import Tracker
from real_ray.tracking.records import replace_file

_POLL_S = 1.0

FILE = "scale.json"
"""Its name in a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Another number of generators. The same one asked for again is another request."""

    num_generators: int
    time: float  # of the request, seconds since 1970


_ADAPTER = TypeAdapter(ScaleRequest)


def ask_for(directory: Path, num_generators: int) -> None:
    """Ask the run in this directory.

    Raises:
        OSError: the file cannot be written.
    """
    request = {"num_generators": num_generators, "time": time.time()}
    replace_file(directory / FILE, json.dumps(request).encode())


def newest_request(directory: Path) -> ScaleRequest | None:
    """What was asked for last; None: nothing that can be read."""
    try:
        return _ADAPTER.validate_json((directory / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


class Scalable(Protocol):
    """What has a number of generators."""

    def scale(self, num_generators: int) -> None:
        """Raises ConfigError for a number that the run does not allow."""
        ...


async def follow_requests(directory: Path, pool: Scalable, tracker: Tracker) -> None:
    """Without an end: do what is asked for."""
    done: ScaleRequest | None = None
    while True:
        request = newest_request(directory)
        if request is not None and request != done:
            done = request
            try:
                pool.scale(request.num_generators)
                tracker.event("scaled", f"{request.num_generators} generators are wanted")
            except ConfigError as error:
                tracker.event("scaling refused", str(error))
        await asyncio.sleep(_POLL_S)
