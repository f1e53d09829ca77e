"""The run directory: what it holds, what it replaces, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import make_config

from real_ray.config import Config, load_config
from real_ray.errors import ConfigError
from real_ray.tracking import RunDirectory


def config_in(output_dir: Path | str, *, overwrite: bool = False) -> Config:
    return make_config(run={"output_dir": str(output_dir), "name": "r", "overwrite": overwrite})


def make_run(output_dir: Path, *, num_steps: int) -> RunDirectory:
    run = RunDirectory(config_in(output_dir))
    (run.logs / "worker.out").write_text("log")
    for step in range(1, num_steps + 1):
        with run.metrics.open("a") as file:
            file.write(f'{{"step": {step}}}\n')
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_holds_the_resolved_config(tmp_path: Path) -> None:
    config = config_in(tmp_path / "some" / "runs")
    run = RunDirectory(config)
    assert run.path == tmp_path / "some" / "runs" / "r"
    assert names(run.path) == ["config.yaml", "logs", "samples"]
    assert load_config(run.path / "config.yaml") == config
    for path in (run.metrics, run.events, run.samples, run.logs, run.reward_curve):
        assert path.parent == run.path


def test_is_absolute_and_knows_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(config_in("~/runs")).path == tmp_path / "home" / "runs" / "r"
    assert RunDirectory(config_in("runs")).path == tmp_path / "runs" / "r"


class TestEarlierRun:
    def test_is_kept(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, num_steps=2)
        with pytest.raises(ConfigError) as refused:
            RunDirectory(config_in(tmp_path))
        assert str(refused.value) == (
            f"run.name: {tmp_path / 'r'} holds an earlier run. Choose another --run.name, or "
            "replace it with --run.overwrite true"
        )
        assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'

    def test_is_replaced_on_demand(self, tmp_path: Path) -> None:
        make_run(tmp_path, num_steps=2)
        run = RunDirectory(config_in(tmp_path, overwrite=True))
        assert names(run.path) == ["config.yaml", "logs", "samples"]
        assert names(run.logs) == []
        assert load_config(run.path / "config.yaml").run.overwrite

    def test_is_replaced_if_it_recorded_no_step(self, tmp_path: Path) -> None:
        make_run(tmp_path, num_steps=0)
        assert names(RunDirectory(config_in(tmp_path)).logs) == []


class TestOtherFiles:
    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "thesis.tex"])
    def test_are_never_removed(self, tmp_path: Path, name: str, overwrite: bool) -> None:
        mine = tmp_path / "r" / name
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(ConfigError) as refused:
            RunDirectory(config_in(tmp_path, overwrite=overwrite))
        assert str(refused.value) == (
            f"run.name: {mine.parent} holds files that are no run of real-ray. Choose another "
            "--run.name or --run.output_dir"
        )
        assert mine.read_text() == "mine"
        assert names(mine.parent) == [name]

    def test_may_lie_beside_it(self, tmp_path: Path) -> None:
        other = make_run(tmp_path, num_steps=1).path.rename(tmp_path / "other")
        (tmp_path / "r").mkdir()
        RunDirectory(config_in(tmp_path))
        assert names(tmp_path) == ["other", "r"]
        assert "metrics.jsonl" in names(other)


class TestPlaceThatCannotBeWritten:
    def refusal(self, output_dir: Path | str) -> str:
        with pytest.raises(ConfigError) as refused:
            RunDirectory(config_in(output_dir))
        message = str(refused.value)
        assert message.startswith(f"run.output_dir: cannot write to {output_dir}/r: ")
        assert message.endswith(". Choose a writable place with --run.output_dir")
        return message

    # Root may write anywhere, so these are places where nobody can make a directory.
    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "Not a directory" in self.refusal(tmp_path / "file")

    def test_a_file_of_that_name(self, tmp_path: Path) -> None:
        (tmp_path / "r").touch()
        assert "Not a directory" in self.refusal(tmp_path)
        assert (tmp_path / "r").is_file()

    def test_on_a_file_system_without_files(self) -> None:
        assert "No such file or directory" in self.refusal("/proc/runs")

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        assert "File name too long" in self.refusal(tmp_path / ("x" * 300))

    def test_in_the_home_of_nobody(self) -> None:
        assert "home directory" in self.refusal("~no-such-user/runs")
