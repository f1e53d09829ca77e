"""The command line: what it prints, its exit codes, and that it stays light."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from fakes import make_config

import real_ray
from real_ray.cli import DEMO_CONFIG, exit_code, main
from real_ray.config import Config, load_config
from real_ray.config.flags import describe_keys
from real_ray.errors import CheckpointError, ConfigError, RewardError
from real_ray.tracking import RunDirectory
from real_ray.tracking.status import StatusTracker
from real_ray.types import Prompt

REPOSITORY = Path(real_ray.__file__).parents[1]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers")


@dataclass
class FakeLaunch:
    """Stands for `actors.launch`: keeps the config instead of running it."""

    outcome: int = 0
    configs: list[Config] = field(default_factory=list)

    def launch(self, config: Config) -> int:
        self.configs.append(config)
        return self.outcome

    def check_start(self, config: Config, train: Sequence[Prompt]) -> str:
        return "a new run"

    def check_cluster(self, config: Config) -> str | None:
        return None


@dataclass
class FakeDemoModel:
    """Stands for `real_ray.demo_model`."""

    path: Path
    num_calls: int = 0

    def obtain(self) -> Path:
        self.num_calls += 1
        return self.path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch()
    module = ModuleType("actors.launch")
    for name in ("launch", "check_start", "check_cluster"):
        setattr(module, name, getattr(fake, name))
    monkeypatch.setitem(sys.modules, "actors.launch", module)
    return fake


@pytest.fixture
def demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDemoModel:
    fake = FakeDemoModel(tmp_path / "fetched")
    module = ModuleType("real_ray.demo_model")
    module.obtain = fake.obtain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "real_ray.demo_model", module)
    return fake


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: m}\ndata: {train: arithmetic}\nloss: {tau: 0.3}\n")
    return path


def run_python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=cwd,  # comes first on the Python path
    )


class TestHelp:
    @pytest.mark.parametrize("command", ["", "train", "validate", "demo", "export", "status"])
    def test_loads_nothing_heavy(self, command: str, tmp_path: Path) -> None:
        args = [*command.split(), "--help"]
        result = run_python(
            "import sys\nfrom real_ray.cli import main\n"
            f"code = main({args})\n"
            f"print('loaded:', [name for name in {HEAVY} if name in sys.modules], code)",
            cwd=tmp_path,
        )
        assert result.stderr == ""
        assert f"Usage: real-ray {command}" in result.stdout
        assert result.stdout.endswith("loaded: [] 0\n")

    def test_train_lists_every_key_with_its_facts(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        assert main(["train", "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for key in describe_keys():
            (line,) = [line for line in lines if f" --{key.name} " in line]
            assert key.description in line
            assert key.bound in line
            assert ("required" if key.default is None else f"default {key.default}]") in line
        for section in Config.model_fields:
            assert any(f"─ {section} ─" in line for line in lines)

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"real-ray {real_ray.__version__}\n"


class TestTrain:
    def test_launches_the_resolved_config(self, launched: FakeLaunch, config_file: Path) -> None:
        args = ["train", str(config_file), "--run.overwrite", "--learner.learning_rate=1e-5"]
        assert main([*args, "--loss.positive_above", "-1", "--run.name", "7"]) == 0
        (config,) = launched.configs
        assert config.loss.tau == 0.3
        assert config.loss.positive_above == -1
        assert config.learner.learning_rate == 1e-5
        assert config.run.overwrite
        assert config.run.name == "7"

    def test_flags_may_come_first(self, launched: FakeLaunch, config_file: Path) -> None:
        assert main(["train", "--run.overwrite", "--loss.tau", "1", str(config_file)]) == 0
        assert launched.configs[0].loss.tau == 1

    def test_exit_code_is_that_of_launch(self, launched: FakeLaunch, config_file: Path) -> None:
        launched.outcome = 143
        assert main(["train", str(config_file)]) == 143

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["no.yaml"], "error: no.yaml: no such config file."),
            (
                ["--loss.tau", "1"],
                "error: give one CONFIG file (got none), as in real-ray train CON",
            ),
            (["a.yaml", "b.yaml"], "error: give one CONFIG file (got a.yaml, b.yaml), as in"),
            (["a.yaml", "-x"], "error: give one CONFIG file (got a.yaml, -x), as in"),
            (["a.yaml", "--lr", "1"], "error: --lr: unknown flag. Use `learner.learning_rate`"),
            (["a.yaml", "--model", "m"], "error: --model: unknown flag. `model` is a section."),
        ],
    )
    def test_bad_arguments(
        self,
        launched: FakeLaunch,
        capsys: pytest.CaptureFixture[str],
        args: list[str],
        message: str,
    ) -> None:
        assert main(["train", *args]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(message)
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert launched.configs == []

    def test_several_problems_have_a_line_each(
        self, launched: FakeLaunch, capsys: pytest.CaptureFixture[str], config_file: Path
    ) -> None:
        assert main(["train", str(config_file), "--loss.tau", "0", "--run.seed", "-1"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(": ")[0] for line in lines] == ["error:", "--run.seed", "--loss.tau"]
        assert launched.configs == []

    def test_usage_errors_of_typer(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trian"]) == 2
        assert "Did you mean 'train'?" in capsys.readouterr().err
        assert main(["train"]) == 2
        assert "Missing argument 'CONFIG'" in capsys.readouterr().err

    def test_another_actors_module_is_named(self, tmp_path: Path, config_file: Path) -> None:
        other = tmp_path / "actors.py"
        other.touch()
        result = run_python(
            f"from real_ray.cli import main\nraise SystemExit(main(['train', '{config_file}']))",
            cwd=tmp_path,
        )
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: the module `actors` is {other}, not real-ray's ")


class TestDemo:
    def test_runs_the_packaged_config(
        self, launched: FakeLaunch, demo_model: FakeDemoModel
    ) -> None:
        assert main(["demo"]) == 0
        (config,) = launched.configs
        assert config == load_config(DEMO_CONFIG, {"model.name_or_path": str(demo_model.path)})
        assert (config.run.name, config.run.overwrite, config.run.num_steps) == ("demo", True, 20)
        assert (config.data.train, config.data.eval) == ("arithmetic", "arithmetic")
        assert (config.loss.tau, config.learner.learning_rate) == (0.5, 2e-5)
        assert config.num_slots == 8
        assert config.max_model_length == 76

    @pytest.mark.parametrize("flag", ["--model", "--model.name_or_path"])
    def test_own_model(self, launched: FakeLaunch, demo_model: FakeDemoModel, flag: str) -> None:
        assert main(["demo", flag, "some/model", "--run.num_steps", "3"]) == 0
        assert launched.configs[0].model.name_or_path == "some/model"
        assert launched.configs[0].run.num_steps == 3
        assert demo_model.num_calls == 0

    @pytest.mark.parametrize("args", [["--loss.tau", "0"], ["--nope"], ["x"]])
    def test_wrong_flags_are_found_before_a_model_is_fetched(
        self, launched: FakeLaunch, demo_model: FakeDemoModel, args: list[str]
    ) -> None:
        assert main(["demo", *args]) == 2
        assert demo_model.num_calls == 0
        assert launched.configs == []


class TestValidate:
    def test_a_model_that_does_not_exist(
        self, launched: FakeLaunch, capsys: pytest.CaptureFixture[str], config_file: Path
    ) -> None:
        assert main(["validate", str(config_file), "--model.name_or_path", "/no/model"]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: model.name_or_path: /no/model does not exist")
        assert "ok" not in captured.out.splitlines()
        assert launched.configs == []


@dataclass
class FakeExport:
    """Stands for `actors.export`: keeps what it was asked for."""

    error: Exception | None = None
    calls: list[tuple[Path, Path, bool]] = field(default_factory=list)

    def export(self, path: Path, directory: Path, *, adapter: bool) -> SimpleNamespace:
        self.calls.append((path, directory, adapter))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            directory=directory, num_tensors=24, dtype="bfloat16", policy_version=7
        )


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> FakeExport:
    fake = FakeExport()
    module = ModuleType("actors.export")
    module.export = fake.export  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "actors.export", module)
    return fake


class TestExport:
    @pytest.mark.parametrize("adapter", [False, True])
    def test_says_what_it_wrote(
        self, exported: FakeExport, capsys: pytest.CaptureFixture[str], adapter: bool
    ) -> None:
        assert main(["export", "runs/a", "out", *["--adapter"] * adapter]) == 0
        assert exported.calls == [(Path("runs/a"), Path("out"), adapter)]
        expected = "out: 24 tensors in bfloat16, policy version 7\n"
        assert capsys.readouterr().out == expected

    def test_what_cannot_be_exported_is_bad_input(
        self, exported: FakeExport, capsys: pytest.CaptureFixture[str]
    ) -> None:
        exported.error = CheckpointError("runs/a has no checkpoint")
        assert main(["export", "runs/a", "out"]) == 2
        assert capsys.readouterr().err == "error: runs/a has no checkpoint\n"

    def test_both_directories_are_needed(
        self, exported: FakeExport, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["export", "runs/a"]) == 2
        assert "Missing argument 'DIR'" in capsys.readouterr().err
        assert exported.calls == []


class TestStatus:
    @pytest.fixture
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        for name in ("sums", "other"):
            run = RunDirectory(make_config(run={"name": name}))
            status = StatusTracker(run, num_steps=8, policy_version=4, checkpoint=None)
            status.ledger({"drawn": 9, "trained": 8, "in flight": 1}, policy_version=5)
            run.close()
        (tmp_path / "runs" / "empty").mkdir()
        (tmp_path / "runs" / "odd" / "status.json").mkdir(parents=True)
        (tmp_path / "runs" / "loop").symlink_to("loop")
        return tmp_path / "runs"

    @pytest.mark.parametrize("run", ["sums", "runs/sums", "./runs/sums/"])
    def test_by_name_or_directory(
        self, runs: Path, capsys: pytest.CaptureFixture[str], run: str
    ) -> None:
        assert main(["status", run]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"run sums in {runs / 'sums'}\n")
        assert "  state        running, last news 0 s ago; no process on this machine" in out
        assert "  step         5 of 8\n" in out
        assert f"real-ray train {runs / 'sums' / 'config.yaml'} --run.overwrite true\n" in out
        assert re.search(r"^ *drawn +9 *$", out, re.MULTILINE)
        assert re.search(r"^ *in flight +1 *$", out, re.MULTILINE)

    @pytest.mark.parametrize(
        ("run", "words"),
        [
            ("sum", r"sum: no such run: no directory sum or runs/sum \(did you mean `sums`\?\)"),
            ("empt", r"no directory empt or runs/empt\. Give the directory of a run, or its name"),
            ("empty", r"error: runs/empty: no run, or one that had not started: it has no status"),
            ("runs/empty", r"error: runs/empty: no run, or one that had not started"),
            ("odd", r"error: runs/odd/status\.json: cannot be read: Is a directory\. Make it"),
            ("loop", r"error: runs/loop/status\.json: cannot be read: Too many levels of symb"),
            ("/no/such/place", r"/no/such/place: no such run: no directory /no/such/place\. G"),
            ("runs/sums/config.yaml", r"no directory runs/sums/config\.yaml or runs/runs/sums/"),
            ("", r"Give the directory of a run, or its name in runs/$"),
        ],
    )
    def test_anything_else_is_bad_input(
        self, runs: Path, capsys: pytest.CaptureFixture[str], run: str, words: str
    ) -> None:
        assert main(["status", run]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert re.search(words, captured.err.rstrip())

    def test_loads_nothing_heavy(self, runs: Path) -> None:
        result = run_python(
            "import sys\nfrom real_ray.cli import main\n"
            "code = main(['status', 'sums'])\n"
            f"print('loaded:', [name for name in {HEAVY} if name in sys.modules], code)",
            cwd=runs.parent,
        )
        assert result.stderr == ""
        assert result.stdout.endswith("loaded: [] 0\n")


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


def in_group(error: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", [error])


class TestErrorPolicy:
    @pytest.mark.parametrize("debug", [False, True])
    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (ConfigError("loss.tau: too small"), 2, "error: loss.tau: too small"),
            (ConfigError("a\nb"), 2, "error:\na\nb"),
            (RewardError("reward failed"), 1, "error: reward failed"),
            (KeyError("x"), 1, "error: KeyError: 'x'"),
            (ValueError("one\ntwo"), 1, "error: ValueError: one"),
            (RuntimeError(), 1, "error: RuntimeError: "),
            (EOFError("pipe"), 1, "error: EOFError: pipe"),
            (in_group(EOFError("pipe")), 1, "error: EOFError: pipe"),
            (in_group(in_group(RewardError("failed"))), 1, "error: failed"),
        ],
    )
    def test_one_message(
        self,
        capsys: pytest.CaptureFixture[str],
        error: Exception,
        code: int,
        message: str,
        debug: bool,
    ) -> None:
        assert exit_code(raising(error), debug=debug) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"\n{message}" in f"\n{captured.err}"
        assert ("Traceback (most recent call last)" in captured.err) is debug
        if not debug:
            assert captured.err.startswith(message)
        is_expected = "Error: " not in message
        assert ("Rerun with --debug" in captured.err) is not (debug or is_expected)

    def test_interrupt(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert exit_code(raising(KeyboardInterrupt()), debug=False) == 130
        assert capsys.readouterr().err == "interrupted\n"

    @pytest.mark.parametrize(
        "args",
        [
            ["--debug", "train", "no.yaml"],
            ["train", "--debug", "no.yaml"],
            ["train", "no.yaml", "--loss.tau", "1", "--debug"],
        ],
    )
    def test_debug_may_stand_anywhere(
        self, capsys: pytest.CaptureFixture[str], args: list[str]
    ) -> None:
        assert main(args) == 2
        assert "Traceback (most recent call last)" in capsys.readouterr().err
        assert main([arg for arg in args if arg != "--debug"]) == 2
        assert "Traceback" not in capsys.readouterr().err
