"""What this machine cannot give is refused before anything is started or written."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fakes import make_config, make_prompts
from tiny_model import build_tokenizer

from actors.launch import check_cluster, check_start, launch
from real_ray.cli import main
from real_ray.config import Config, dump_config
from real_ray.errors import ConfigError, ResourceError
from real_ray.tracking import RunDirectory
from real_ray.tracking.status import StatusTracker

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    return directory


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Iterator[Callable[..., Config]]:
    """Makes configs of a run on this machine; nothing may have been started or written."""
    before = psutil.Process().children(recursive=True)

    def make(**sections: dict[str, object]) -> Config:
        return make_config(
            run={"output_dir": str(tmp_path / "runs")},
            model={"name_or_path": str(model)},
            reward={"num_workers": 1, "cpus_per_worker": 0.25},
            **{"cluster": {"address": "local", "num_cpus": 3}, **sections},
        )

    yield make
    assert psutil.Process().children(recursive=True) == before
    assert list(tmp_path.glob("runs*")) == []


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def refusal(check: Callable[[Config], object], config: Config) -> str:
    with pytest.raises(ResourceError) as refused:
        check(config)
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("check", [check_cluster, launch])
class TestRefusal:
    def test_more_cpus_than_there_are(
        self, run: Callable[..., Config], check: Callable[[Config], object]
    ) -> None:
        message = refusal(check, run(learner={"num_ranks": 2, "cpus_per_rank": 1.5}))
        assert message == (
            "Ray on this machine (cluster.num_cpus 3): the run needs 4.25 CPUs, the cluster has 3: "
            "generators 1 x 1, learner ranks 2 x 1.5, reward workers 1 x 0.25. Lower "
            "rollout.cpus_per_generator, learner.cpus_per_rank, reward.cpus_per_worker or a count, "
            "or add nodes"
        )

    def test_more_cpus_than_this_machine_has(
        self, run: Callable[..., Config], check: Callable[[Config], object]
    ) -> None:
        there = len(os.sched_getaffinity(0))
        config = run(cluster={"address": "local"}, rollout={"cpus_per_generator": there + 1.0})
        assert f"needs {there + 2.25:g} CPUs, the cluster has {there}: " in refusal(check, config)

    @pytest.mark.parametrize("key", ["learner.port", "sync.port"])
    def test_a_port_in_use(
        self,
        run: Callable[..., Config],
        check: Callable[[Config], object],
        taken: int,
        free: int,
        key: str,
    ) -> None:
        ports = {"learner.port": free, "sync.port": free, key: taken}
        config = run(learner={"port": ports["learner.port"]}, sync={"port": ports["sync.port"]})
        assert refusal(check, config) == (
            f"{key}: port {taken} on {LOOPBACK} is in use: choose another one, or 0 for a free one"
        )


def test_a_run_that_fits_passes(run: Callable[..., Config], free: int) -> None:
    assert check_cluster(run(sync={"port": free})) is None
    assert check_cluster(run(sync={"port": free})) is None, "the check has given the port back"


@pytest.mark.parametrize("command", ["train", "validate"])
def test_the_command_ends_with_one_message(
    run: Callable[..., Config],
    taken: int,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(run(learner={"port": taken})))
    assert main([command, str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: learner.port: port {taken} on {LOOPBACK} is in use: ")
    assert captured.err.count("\n") == 1
    assert "ok" not in captured.out.splitlines()


def test_a_finished_run_is_left_as_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        run={"output_dir": str(tmp_path), "name": "r"},
        model={"name_or_path": str(model)},
        reward={"num_workers": 1},
        cluster={"address": "local", "num_cpus": 3},
    )
    directory = RunDirectory(config)
    StatusTracker(directory, num_steps=4, policy_version=4, checkpoint=None).end("finished")
    directory.close()
    files = {path: path.stat().st_mtime_ns for path in directory.path.iterdir()}
    before = psutil.Process().children(recursive=True)
    assert launch(config) == 0
    assert capsys.readouterr().out.startswith("run r is finished; its files are in ")
    assert {path: path.stat().st_mtime_ns for path in directory.path.iterdir()} == files
    assert psutil.Process().children(recursive=True) == before


def test_a_run_that_would_be_replaced_is_refused_by_the_check_too(tmp_path: Path) -> None:
    config = make_config(run={"output_dir": str(tmp_path)}, checkpoint={"resume": "never"})
    assert check_start(config, make_prompts(4)) == f"run run in {tmp_path / 'run'}"
    directory = RunDirectory(config)
    directory.metrics.write_text("{}")
    directory.close()
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_start(config, make_prompts(4))


@pytest.mark.parametrize("place", ["a file", "a file/runs"])
def test_the_check_refuses_an_output_directory_that_cannot_be_one(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "a file").touch()
    config = make_config(run={"output_dir": str(tmp_path / place)})
    with pytest.raises(ConfigError, match=r"output_dir: cannot write .*: Not a directory\. Choose"):
        check_start(config, make_prompts(4))


def test_an_output_directory_that_cannot_be_written(
    run: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(run()))
    assert main(["train", str(file), "--run.output_dir", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: run.output_dir: cannot write to {tmp_path / 'file'}/run: Not a directory. Choose "
        "a writable place with --run.output_dir\n"
    )
