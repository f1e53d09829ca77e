"""The run directory: what it holds, what it replaces, and what it leaves alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import make_config

from real_ray.config import Config, load_config
from real_ray.errors import ConfigError
from real_ray.tracking import RunDirectory
from real_ray.tracking.lock import RunLock
from real_ray.tracking.records import EarlierRecords


def config_in(output_dir: Path | str, *, overwrite: bool = False, resume: str = "auto") -> Config:
    return make_config(
        run={"output_dir": str(output_dir), "name": "r", "overwrite": overwrite},
        checkpoint={"resume": resume},
    )


def make_run(output_dir: Path, *, num_steps: int) -> RunDirectory:
    """A run that has ended."""
    run = RunDirectory(config_in(output_dir))
    (run.logs / "worker.out").write_text("log")
    for step in range(1, num_steps + 1):
        with run.metrics.open("a") as file:
            file.write(row_of(step))
        (run.samples / f"step_{step:06d}.jsonl").write_text("{}\n")
    run.close()
    return run


def row_of(step: int) -> str:
    return f'{{"step": {step}, "reward/mean": {step / 8}, "time/elapsed": {step * 10.0}}}\n'


def names(directory: Path) -> list[str]:
    """What a directory holds, but the lock."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_holds_the_resolved_config(tmp_path: Path) -> None:
    config = config_in(tmp_path / "some" / "runs")
    run = RunDirectory(config)
    assert run.path == tmp_path / "some" / "runs" / "r"
    assert names(run.path) == ["config.yaml", "logs", "samples"]
    assert load_config(run.path / "config.yaml") == config
    for path in (run.metrics, run.events, run.status, run.samples, run.logs, run.reward_curve):
        assert path.parent == run.path


def test_is_absolute_and_knows_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(config_in("~/runs")).path == tmp_path / "home" / "runs" / "r"
    assert RunDirectory(config_in("runs")).path == tmp_path / "runs" / "r"


def test_its_config_finds_it_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(config_in("runs"))
    monkeypatch.chdir("/")
    assert load_config(run.config).run.directory == run.path


class TestEarlierRun:
    def test_is_kept(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, num_steps=2)
        with pytest.raises(ConfigError) as refused:
            RunDirectory(config_in(tmp_path))
        assert str(refused.value) == (
            f"run.name: {tmp_path / 'r'} holds an earlier run without a checkpoint to continue it "
            "from. Choose another --run.name, or replace it with --run.overwrite true"
        )
        assert run.metrics.read_text() == row_of(1) + row_of(2)
        assert names(run.logs) == ["worker.out"]

    @pytest.mark.parametrize("name", ["checkpoints", "model"])
    def test_is_kept_for_what_it_has_learned(self, tmp_path: Path, name: str) -> None:
        learned = make_run(tmp_path, num_steps=0).path / name
        learned.mkdir()
        with pytest.raises(ConfigError, match="holds an earlier run"):
            RunDirectory(config_in(tmp_path, resume="never"))
        assert learned.is_dir()

    def test_may_be_continued_instead(self, tmp_path: Path) -> None:
        make_run(tmp_path, num_steps=1)
        config = config_in(tmp_path, resume="never")
        with pytest.raises(ConfigError, match=r"continue that one with --checkpoint\.resume auto"):
            RunDirectory(config)

    def test_is_replaced_on_demand(self, tmp_path: Path) -> None:
        checkpoint = make_run(tmp_path, num_steps=2).path / "checkpoints" / "step_000002"
        checkpoint.mkdir(parents=True)
        run = RunDirectory(config_in(tmp_path, overwrite=True))
        assert names(run.path) == ["config.yaml", "logs", "samples"]
        assert names(run.logs) == []
        assert load_config(run.path / "config.yaml").run.overwrite

    def test_is_replaced_if_it_recorded_no_step(self, tmp_path: Path) -> None:
        make_run(tmp_path, num_steps=0)
        assert names(RunDirectory(config_in(tmp_path)).logs) == []


class TestContinuedRun:
    """What was recorded after the checkpoint is made again."""

    def event(self, kind: str, **data: object) -> str:
        return json.dumps({"time": 1.0, "kind": kind, "text": "八", **data}) + "\n"

    def test_later_steps_are_removed(self, tmp_path: Path) -> None:
        earlier = make_run(tmp_path, num_steps=5)
        for name in ("step_000003", "step_000004", "step_000004_1"):
            (earlier.path / "bad_steps" / name).mkdir(parents=True)
        run = RunDirectory(config_in(tmp_path), continued_after=3)
        assert run.metrics.read_text() == row_of(1) + row_of(2) + row_of(3)
        assert names(run.samples) == [f"step_00000{step}.jsonl" for step in (1, 2, 3)]
        assert names(run.path / "bad_steps") == ["step_000003"]
        assert names(run.logs) == ["worker.out"]
        assert run.earlier.rewards == ((1, 0.125), (2, 0.25), (3, 0.375))
        assert run.earlier.elapsed_s == 30.0

    def test_the_config_is_that_of_now(self, tmp_path: Path) -> None:
        make_run(tmp_path, num_steps=1)
        config = config_in(tmp_path, overwrite=True)
        assert load_config(RunDirectory(config, continued_after=1).config) == config

    def test_events_stay(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, num_steps=3)
        text = "".join(
            [
                self.event("evaluation", policy_version=0, **{"eval/accuracy": 0.25}),
                self.event("evaluation", policy_version=2, **{"eval/accuracy": 0.5}),
                self.event("resumed"),
                self.event("evaluation", policy_version=2, **{"eval/accuracy": 0.625}),
                self.event("evaluation", policy_version=3, **{"eval/accuracy": 0.75}),
            ]
        )
        run.events.write_text(text)
        run = RunDirectory(config_in(tmp_path), continued_after=2)
        assert run.events.read_text() == text
        assert run.earlier.accuracy == ((0, 0.25), (2, 0.625))

    @pytest.mark.parametrize(
        "cut", ["{", '{"step": 3, "rew', '{"step": 3, "x": "\ud83d', "\0\0\0\0"]
    )
    def test_a_line_that_was_cut_is_dropped(self, tmp_path: Path, cut: str) -> None:
        run = make_run(tmp_path, num_steps=2)
        for file in (run.metrics, run.events):
            with file.open("ab") as end:
                end.write(cut.encode(errors="surrogatepass")[: len(cut)])
        RunDirectory(config_in(tmp_path), continued_after=2).close()
        assert run.metrics.read_text() == row_of(1) + row_of(2)
        assert run.events.read_text() == ""

    def test_a_line_that_lacks_only_its_end_is_kept(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, num_steps=2)
        run.metrics.write_text(row_of(1) + row_of(2).rstrip())
        RunDirectory(config_in(tmp_path), continued_after=2).close()
        assert run.metrics.read_text() == row_of(1) + row_of(2)

    def test_a_step_without_a_finite_reward(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, num_steps=1)
        with run.metrics.open("a") as file:
            file.write('{"step": 2, "reward/mean": null, "time/elapsed": 20.0}\n')
        continued = RunDirectory(config_in(tmp_path), continued_after=2)
        assert continued.earlier.rewards == ((1, 0.125),)
        assert continued.earlier.elapsed_s == 20.0

    @pytest.mark.parametrize("line", ["x", "5", "[]", "{}", '"kind"'])
    def test_foreign_lines_are_named(self, tmp_path: Path, line: str) -> None:
        run = make_run(tmp_path, num_steps=1)
        text = row_of(1) + line + "\n" + row_of(2)
        run.metrics.write_text(text)
        with pytest.raises(
            ConfigError, match=r"metrics\.jsonl:2: no record of real-ray"
        ) as refused:
            RunDirectory(config_in(tmp_path), continued_after=1)
        assert "--checkpoint.resume never --run.overwrite true" in str(refused.value)
        assert run.metrics.read_text() == text

    def test_a_run_of_checkpoints_alone_can_be_continued(self, tmp_path: Path) -> None:
        checkpoint = tmp_path / "r" / "checkpoints" / "step_000002"
        checkpoint.mkdir(parents=True)
        run = RunDirectory(config_in(tmp_path), continued_after=2)
        assert run.earlier == EarlierRecords()
        assert checkpoint.is_dir()


class TestLock:
    """A second process does not write into a run, nor remove it."""

    @pytest.mark.parametrize("continued_after", [None, 1])
    def test_one_at_a_time(self, tmp_path: Path, continued_after: int | None) -> None:
        make_run(tmp_path, num_steps=2)
        running = RunDirectory(config_in(tmp_path), continued_after=2)
        config = config_in(tmp_path, overwrite=True)
        with pytest.raises(ConfigError) as refused:
            RunDirectory(config, continued_after=continued_after)
        assert str(refused.value) == (
            f"run.name: another process is running {running.path}. Wait for its end, stop it, or "
            "choose another --run.name"
        )
        assert running.metrics.read_text() == row_of(1) + row_of(2)
        running.close()
        RunDirectory(config, continued_after=continued_after).close()

    def test_a_killed_process_holds_none(self, tmp_path: Path) -> None:
        code = (
            "import os, signal\n"
            "from pathlib import Path\n"
            "from real_ray.tracking.lock import RunLock\n"
            f"lock = RunLock(Path({str(tmp_path / '.lock')!r}))\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        killed = subprocess.run([sys.executable, "-c", code], check=False)
        assert killed.returncode == -signal.SIGKILL
        RunLock(tmp_path / ".lock").release()


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
        assert [path.name for path in mine.parent.iterdir()] == [name]

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
