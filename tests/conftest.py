"""What all tests share: no downloads, no deadlines, and unit tests on one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # all on loopback; read with ray's import
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is imported: before any test

settings.register_profile("real-ray", deadline=None)  # a busy machine is not a failure
settings.load_profile("real-ray")

UNIT = Path(__file__).parent / "unit"


@pytest.fixture(autouse=True, scope="module")
def single_threaded_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads only slow down tiny tensors. Not by environment: that would reach other processes."""
    torch = sys.modules.get("torch")
    if torch is None or UNIT not in request.path.parents:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
