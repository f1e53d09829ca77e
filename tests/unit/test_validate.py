"""`validate` looks at everything that a run needs, in order, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import build_tokenizer

from real_ray.config import Config, load_config
from real_ray.errors import ConfigError, DataError, ModelError, ResourceError, UserError
from real_ray.validate import validate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    return directory


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> dict[str, str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1+1", "answer": "3"}\n')
    return {"model.name_or_path": str(model), "data.train": str(rows)}


def no_cluster(config: Config) -> str | None:
    return None


def full_cluster(config: Config) -> str | None:
    raise ResourceError("8 GPUs are needed, the cluster has 2")


def test_says_what_was_checked(flags: dict[str, str], model: Path) -> None:
    config = load_config(None, flags | {"data.eval": flags["data.train"]})
    lines = list(validate(config, check_cluster=lambda config: "1 node, 2 CPUs"))
    facts = dict(line.split(": ", 1) for line in lines)
    assert list(facts) == ["run", "loss", "model", "train", "eval", "reward", "cluster"]
    assert "100 steps of 8 prompts x 8 completions" in facts["run"]
    assert "tau 0.5" in facts["loss"]
    assert str(model) in facts["model"]
    template = len("user\n\nassistant\n") + 3  # a token per character, and special ones
    lengths = f"2 rows, prompts of {template + 3} to {template + 5} tokens (at most 1024)"
    assert lengths in facts["train"]
    assert lengths in facts["eval"]
    assert "exact_match" in facts["reward"]
    assert facts["cluster"].strip() == "1 node, 2 CPUs"


def test_without_eval_and_cluster(flags: dict[str, str]) -> None:
    lines = list(validate(load_config(None, flags), check_cluster=no_cluster))
    assert any(line.startswith("eval: ") and "none" in line for line in lines)
    assert "none is up" in lines[-1]


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("model.name_or_path", "/no/model", ModelError),
        ("data.train", "/no/data.jsonl", DataError),
        ("data.eval", "/no/data.jsonl", DataError),
        ("data.answer_column", "solution", DataError),
        ("data.max_prompt_length", "3", DataError),
        ("reward.function", "exact_mach", ConfigError),
    ],
)
def test_what_is_wrong_is_found(
    flags: dict[str, str], key: str, value: str, error: type[UserError]
) -> None:
    with pytest.raises(error):
        list(validate(load_config(None, flags | {key: value}), check_cluster=no_cluster))


def test_too_small_a_cluster(flags: dict[str, str]) -> None:
    with pytest.raises(ResourceError, match="the cluster has 2"):
        list(validate(load_config(None, flags), check_cluster=full_cluster))
