"""Learner ranks for the modules that train with them; each module starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_ranks import LearnerRanks, two_sizes_of_learner
from tiny_model import build_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def learners(model: Path, run_directory: Path) -> Iterator[dict[int, LearnerRanks]]:
    with two_sizes_of_learner(model, run_directory) as found:
        yield found
