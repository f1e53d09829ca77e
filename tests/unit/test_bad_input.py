"""Every kind of bad input: exit code 2, one message that helps, nothing started."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from tiny_model import build_model

from real_ray.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def train(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run real-ray on a good config with these flags; return its one error message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = {
        "model": {"name_or_path": str(model)},
        "data": {"train": "arithmetic", "max_prompt_length": 100},
        "rollout": {"cpus_per_generator": 0.5},
        "learner": {"cpus_per_rank": 0.5},
    }
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(config))

    def run(*flags: str, config: str = "good.yaml", command: str = "train") -> str:
        children = set(psutil.Process().children(recursive=True))
        assert main([command, config, *flags]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert error.count("error:") == 1
        assert set(psutil.Process().children(recursive=True)) <= children
        assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
        return error

    return run


def test_missing_config_file(train: Callable[..., str]) -> None:
    assert re.search(r"goood\.yaml.*good\.yaml", train(config="goood.yaml"), re.DOTALL)


def test_wrong_yaml(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("run:\n  name: [a\nmodel: {}\n")
    assert re.search(r"bad\.yaml:[23]", train(config="bad.yaml"))


def test_unknown_key(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("loss:\n  tua: 0.5\n")
    assert re.search(r"bad\.yaml:2.*loss\.tua.*tau", train(config="bad.yaml"))
    assert re.search(r"--loss\.tua.*tau", train("--loss.tua", "0.5"))


def test_wrong_type(train: Callable[..., str]) -> None:
    assert re.search(r"--run\.num_steps.*many", train("--run.num_steps", "many"))


def test_tau_zero(train: Callable[..., str]) -> None:
    assert re.search(r"--loss\.tau.*0.*> 0", train("--loss.tau", "0"))


def test_a_sequence_above_the_microbatch(train: Callable[..., str]) -> None:
    error = train("--learner.max_tokens_per_microbatch", "600")
    assert re.search(
        r"--learner\.max_tokens_per_microbatch.*600.*data\.max_prompt_length = 100.*"
        r"rollout\.max_completion_length = 512.*612",
        error,
    )


def test_a_clip_range_for_real(train: Callable[..., str]) -> None:
    assert re.search(r"--loss\.epsilon.*0\.2.*loss\.type", train("--loss.epsilon", "0.2"))


def test_an_adapter_without_lora(train: Callable[..., str]) -> None:
    assert re.search(
        r"--learner\.lora_sync.*learner\.lora_rank", train("--learner.lora_sync", "adapter")
    )


def test_settings_of_other_trainers(train: Callable[..., str]) -> None:
    assert re.search(r"--kl_coef.*`loss\.beta`", train("--kl_coef", "0.1"))
    assert re.search(r"--teacher_model.*no teacher", train("--teacher_model", "m"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"zero_optimization": {"stage": 3}}', r"zero_optimization\.stage.*3.*2.*zero_stage"),
        ('{\n"zero_optimization": }', r"ds\.json:2:"),
        (None, r"learner\.deepspeed.*ds\.json"),
    ],
)
def test_a_deepspeed_file_that_is_wrong(
    train: Callable[..., str], tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    error = train("--learner.deepspeed", "ds.json", command="validate")
    assert re.search(words, error)


def test_empty_dataset(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    error = train("--data.train", "empty.jsonl")
    assert "empty.jsonl" in error


def test_missing_column(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    error = train("--data.train", "data.jsonl")
    assert re.search(r"data\.jsonl.*prompt.*question", error, re.DOTALL)


def test_prompt_above_the_length_limit(train: Callable[..., str]) -> None:
    error = train("--data.max_prompt_length", "20")
    assert re.search(
        r"arithmetic.*row 0.*61 tokens.*data\.max_prompt_length = 20", error, re.DOTALL
    )


def test_model_path_that_does_not_exist(train: Callable[..., str]) -> None:
    assert "/no/such/model" in train("--model.name_or_path", "/no/such/model")


def test_more_resources_than_the_machine_has(train: Callable[..., str]) -> None:
    error = train("--rollout.num_generators", "1000")
    assert re.search(r"501 CPUs.*has 2.*1000 x 0.5.*rollout\.cpus_per_generator", error)


@pytest.mark.parametrize("key", ["learner.port", "sync.port"])
def test_port_in_use(train: Callable[..., str], key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = train(f"--{key}", str(port), "--cluster.num_cpus", "4")
    assert re.search(rf"{key}.*{port}.*in use", error)


def test_output_directory_that_cannot_be_written(train: Callable[..., str]) -> None:
    error = train("--run.output_dir", "/proc/runs", "--cluster.num_cpus", "4")
    assert re.search(r"run\.output_dir.*/proc/runs/run.*--run\.output_dir", error)


def test_an_earlier_run_is_not_overwritten(train: Callable[..., str], tmp_path: Path) -> None:
    earlier = tmp_path / "elsewhere" / "run"
    earlier.mkdir(parents=True)
    (earlier / "samples").mkdir()
    (earlier / "logs").mkdir()
    (earlier / "config.yaml").write_text("")
    (earlier / "metrics.jsonl").write_text("{}\n")
    error = train("--run.output_dir", "elsewhere", "--cluster.num_cpus", "4")
    assert re.search(r"elsewhere/run.*--run\.overwrite true", error)
    assert (earlier / "metrics.jsonl").exists()


def test_a_checkpoint_that_is_not_there(train: Callable[..., str], tmp_path: Path) -> None:
    for command in ("train", "validate"):
        error = train(
            *("--checkpoint.resume", "no/checkpoint", "--cluster.num_cpus", "4"), command=command
        )
        assert re.search(r"checkpoint\.resume: .*/no/checkpoint does not exist.*step_N", error)


def test_a_run_with_checkpoints_of_which_none_is_whole(
    train: Callable[..., str], tmp_path: Path
) -> None:
    damaged = tmp_path / "elsewhere" / "run" / "checkpoints" / "step_000002"
    damaged.mkdir(parents=True)
    error = train(*("--run.output_dir", "elsewhere", "--run.overwrite", "--cluster.num_cpus", "4"))
    assert re.search(r"elsewhere/run has checkpoints.*step_000002.*resume never", error)
    assert damaged.is_dir()


def test_too_few_prompts_for_a_step(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    error = train("--data.train", "data.jsonl", "--data.drop_last", "--run.num_epochs", "3")
    assert re.search(r"1 prompts, in 3 epoch.*learner\.prompts_per_step = 8", error)


def test_the_status_of_no_run(train: Callable[..., str]) -> None:
    assert re.search(r"run7: no such run: .*runs/run7", train(config="run7", command="status"))


def test_reward_function_that_cannot_be_imported(train: Callable[..., str]) -> None:
    assert re.search(
        r"reward\.function.*no_such_module", train("--reward.function", "no_such_module:f")
    )


def test_a_cluster_that_does_not_answer(train: Callable[..., str]) -> None:
    error = train("--cluster.address", "not-an-address")
    assert re.search(r"cluster\.address.*not-an-address", error)
