"""Timings from the records of a run."""

from __future__ import annotations

import json
from itertools import islice
from math import inf, nan
from pathlib import Path
from random import Random

import pytest
from fakes import make_config

from real_ray.config import dump_config
from real_ray.errors import ConfigError
from real_ray.simulate import Distribution, simulate, timings_of_run


def row(**changes: float | None) -> dict[str, float | None]:
    """A line of metrics.jsonl, as far as it matters."""
    values: dict[str, float | None] = {
        "time/generate": 5.0,
        "time/score": 0.5,
        "time/train": 3.0,
        "time/sync": 1.0,
        "time/pause": 0.75,
        "async/in_flight_updates": 0,
    }
    return values | {name.replace("_", "/", 1): value for name, value in changes.items()}


def write_run(directory: Path, rows: list[dict[str, float | None]]) -> Path:
    config = make_config(rollout={"num_generators": 2, "max_staleness": 2})
    (directory / "config.yaml").write_text(dump_config(config))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return directory


def first(seconds: Distribution, count: int) -> list[float]:
    return list(islice(seconds.draws(Random(0)), count))


def test_every_step_but_the_first_counts_in_its_order(tmp_path: Path) -> None:
    rows = [row(time_train=90.0), row(time_train=3.0), row(time_train=5.0)]
    timings = timings_of_run(write_run(tmp_path, rows))
    assert first(timings.train, 4) == [3.0, 5.0, 3.0, 5.0]
    assert (timings.generate.mean, timings.score.mean) == (5.0, 0.5)
    assert (timings.train.mean, timings.sync.mean, timings.pause.mean) == (4.0, 1.0, 0.75)
    assert timings.groups_per_generator == 5  # 9 groups in the pipeline of 2 generators


def test_times_of_a_step_meet_in_its_simulation(tmp_path: Path) -> None:
    rows = [row()] + [row(time_generate=10.0 + n, time_train=n, time_sync=n) for n in (1.0, 2, 3)]
    timings = timings_of_run(write_run(tmp_path, rows))
    assert first(timings.generate, 7) == [11, 11, 11, 12, 12, 12, 13], "a step has three groups"
    assert first(timings.train, 3) == [1, 2, 3]
    assert first(timings.sync, 4) == [3, 1, 2, 3], "version 0 is synced before the first step"


def test_pauses_are_no_part_of_generating(tmp_path: Path) -> None:
    # Of 3 groups one, then all met the sync of two steps before.
    rows = [row(), row(time_pause=3.0)] + [row(async_in_flight_updates=n) for n in (0, 1, 3)]
    timings = timings_of_run(write_run(tmp_path, rows))
    assert first(timings.generate, 12)[::3] == pytest.approx([5, 5, 5 - 3 / 3, 5 - 0.75])
    assert first(timings.pause, 3) == [0.75, 3.0, 0.75]


def test_a_simulation_in_these_timings_takes_what_the_run_took(tmp_path: Path) -> None:
    timings = timings_of_run(write_run(tmp_path, [row()] * 3))
    config = make_config(rollout={"num_generators": 2, "max_staleness": 0})
    assert simulate(config, timings).seconds_per_step == pytest.approx(5 + 2 * 0.5 + 3 + 1)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--like: .*metrics\.jsonl cannot be read: No such file"):
        timings_of_run(tmp_path)
    with pytest.raises(ConfigError, match="fewer than 2 steps"):
        timings_of_run(write_run(tmp_path, [row()]))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"--like: .*metrics\.jsonl cannot be read: Is a dir"):
        timings_of_run(tmp_path)


@pytest.mark.parametrize(
    "line", [b"[]", b"5", b"null", b"", b'{"step": 1', b"{step: 1}", b'{"step": "\xff"}']
)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_lines_that_are_no_json_objects_are_refused(
    tmp_path: Path, line: bytes, place: int
) -> None:
    file = write_run(tmp_path, [row()] * 2) / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    lines.insert(place - 1, line)
    # Of a cut file too, unless it is its last line.
    file.write_bytes(b"\n".join(lines) + b"\n" * (place == 3))
    with pytest.raises(ConfigError) as raised:
        timings_of_run(tmp_path)
    message = str(raised.value)
    assert message.startswith(f"--like: {file}:{place}: no JSON object (got '{line[:5].decode()}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (nan, "NaN"), (inf, "Infinity"), (-0.5, "-0.5"), (True, "true")],
)
@pytest.mark.parametrize("name", ["time/sync", "async/in_flight_updates"])
def test_what_is_no_time_is_refused(
    tmp_path: Path, name: str, value: float | None, text: str
) -> None:
    write_run(tmp_path, [row(), row() | {name: value}, row()])
    with pytest.raises(ConfigError) as raised:
        timings_of_run(tmp_path)
    assert str(raised.value) == (
        f"--like: {tmp_path / 'metrics.jsonl'}:2: {name} must be a finite number from 0 on "
        f"(got {text}). Give another run"
    )


@pytest.mark.parametrize("cut", ["", "{", '{"time/train": 9', '{"text": "\udcc3'])
def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, cut: str) -> None:
    file = write_run(tmp_path, [row(), row(time_train=3.0)]) / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + cut.encode("utf-8", "surrogateescape"))
    assert first(timings_of_run(tmp_path).train, 2) == [3.0, 3.0]
    file.write_bytes(whole.rstrip())
    assert first(timings_of_run(tmp_path).train, 2) == [3.0, 3.0], "only its end of line is cut"
