"""Files of a weight transfer in shared memory: how they are made, and what is left of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors import shared_wire
from actors.shared_wire import create


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_wire, "_DIRECTORY", tmp_path)
    return tmp_path


def test_its_memory_is_there_before_anybody_writes() -> None:
    path = create("here", 2**20)
    assert path is not None
    assert path.stat().st_size == 2 * 2**20
    assert path.stat().st_blocks * 512 >= 2 * 2**20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_memory_that_others_have_taken_meanwhile(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(_: int, __: int, ___: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert create("here", 2**20) is None
    assert not list(directory.iterdir())


def test_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_wire, "_DIRECTORY", Path("/nowhere"))
    assert create("here", 2**20) is None


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(directory: Path) -> None:
    made = [
        create("mine", 2**10),
        *(directory / f"real-ray-{name}" for name in ("1-1-of-another-namespace", "unknown")),
    ]
    leave_one = (
        "import pathlib, sys; from actors import shared_wire\n"
        "shared_wire._DIRECTORY = pathlib.Path(sys.argv[1])\n"
        "assert shared_wire.create('left', 2**10)"
    )
    subprocess.run([sys.executable, "-c", leave_one, str(directory)], check=True)
    for path in made[1:]:
        assert path is not None
        path.touch()
    assert len(list(directory.iterdir())) == 4
    made.append(create("next", 2**10))
    assert set(directory.iterdir()) == set(made)
