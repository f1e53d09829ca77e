"""Weights & Biases: an offline run is written without account or network."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import make_config

from real_ray.errors import ConfigError
from real_ray.tracking import RunDirectory
from real_ray.tracking.wandb import WandbTracker

_FILE_HEADER, _RECORD_HEADER = 7, 7  # bytes


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What wandb takes for its server; no account is known."""
    for name in os.environ:
        if name.startswith("WANDB_") and name != "WANDB_MODE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "true")  # its advertisement, if others import openai
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    import wandb

    wandb.teardown()


def start(
    tmp_path: Path, mode: str, *, continued_after: int | None = None, **run: object
) -> tuple[WandbTracker, RunDirectory]:
    config = make_config(
        run={"output_dir": str(tmp_path), "name": "r", **run},
        loss={"tau": 0.25},
        tracking={"wandb": mode, "wandb_project": "sums"},
    )
    directory = RunDirectory(config, continued_after=continued_after)
    return WandbTracker(config, directory), directory


def records(path: Path) -> Iterator[Any]:
    """The protobufs of a small wandb file: LevelDB's log format, each record in one piece."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # whose process may still be writing after a run's end
    content = path.read_bytes()
    assert len(content) < 2**15, "records of a larger file may be in pieces"
    position = _FILE_HEADER
    while position < len(content):
        _, length, _ = struct.unpack_from("<IHB", content, position)
        position += _RECORD_HEADER
        yield Record.FromString(content[position : position + length])
        position += length


def rows(written: list[Any], *names: str) -> list[dict[str, str]]:
    """What was logged under these names, call by call."""
    found = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in r.history.item}
        for r in written
        if r.WhichOneof("record_type") == "history"
    ]
    return [{name: row[name] for name in names if name in row} for row in found]


def test_offline_writes_a_run(
    tmp_path: Path, server: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker, run = start(tmp_path, "offline")
    tracker.evaluation(0, 0.25, 32)
    tracker.step({"step": 1, "reward/mean": 0.375}, ())
    tracker.step({"step": 2, "reward/mean": 0.625}, ())
    tracker.evaluation(2, 0.5, 32)
    tracker.close()

    (file,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    written = list(records(file))
    assert rows(written, "step", "reward/mean", "eval/accuracy", "eval/policy_version") == [
        {"step": "0", "eval/accuracy": "0.25", "eval/policy_version": "0"},
        {"step": "1", "reward/mean": "0.375"},
        {"step": "2", "reward/mean": "0.625"},
        {"step": "2", "eval/accuracy": "0.5", "eval/policy_version": "2"},
    ]
    defined = [r.metric for r in written if r.WhichOneof("record_type") == "metric"]
    assert [(m.glob_name, m.step_metric) for m in defined] == [("*", "step")], "the x-axis"
    (header,) = [r.run for r in written if r.WhichOneof("record_type") == "run"]
    assert (header.project, header.display_name) == ("sums", "r")
    config = {item.key: item.value_json for item in header.config.update}
    assert '"tau":0.25' in config["loss"].replace(" ", "")

    with pytest.raises(BlockingIOError):  # nobody has called
        server.accept()
    assert capfd.readouterr() == ("", "")


def test_a_continued_run_goes_on_in_the_same_one(tmp_path: Path, server: socket.socket) -> None:
    """Steps that were logged and are made again come again: only wandb's own step always rises."""
    first, run = start(tmp_path, "offline")
    for step in (1, 2, 3):
        first.step({"step": step, "reward/mean": 0.25}, ())
    first.close()
    (file_before,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    run.close()
    again, run = start(tmp_path, "offline", continued_after=1, num_steps=8)
    again.step({"step": 2, "reward/mean": 0.5}, ())
    again.step({"step": 3, "reward/mean": 0.5}, ())
    again.close()

    parts = [
        [file_before],
        set(run.path.glob("wandb/offline-run-*/run-*.wandb")) - {file_before},
    ]
    before, after = (list(records(file)) for (file,) in parts)
    ids = [r.run.run_id for r in before + after if r.WhichOneof("record_type") == "run"]
    assert len(ids) == 2
    assert ids[0] == ids[1]
    assert rows(before, "step") == [{"step": "1"}, {"step": "2"}, {"step": "3"}]
    assert rows(after, "step") == [{"step": "2"}, {"step": "3"}]


def test_online_without_an_account_says_what_to_do(tmp_path: Path, server: socket.socket) -> None:
    with pytest.raises(ConfigError) as refused:
        start(tmp_path, "online")
    message = str(refused.value)
    assert message.startswith("tracking.wandb = online: wandb does not start: ")
    assert message.endswith("Log in with `wandb login`, or use --tracking.wandb offline")
    assert "\n" not in message
