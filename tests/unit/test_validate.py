"""`validate` looks at everything that a run needs, in order, and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny_model import build_tokenizer

from real_ray.config import Config, load_config
from real_ray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    ResourceError,
    UserError,
)
from real_ray.types import Prompt
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


def new_run(config: Config, train: Sequence[Prompt]) -> str:
    return f"run {config.run.name}, {config.num_steps} steps, {len(train)} prompts"


def check(
    flags: dict[str, str],
    *,
    check_start: Callable[[Config, Sequence[Prompt]], str] = new_run,
    check_cluster: Callable[[Config], str | None] = no_cluster,
) -> list[str]:
    return list(
        validate(load_config(None, flags), check_start=check_start, check_cluster=check_cluster)
    )


def test_says_what_was_checked(flags: dict[str, str], model: Path) -> None:
    flags |= {"data.eval": flags["data.train"], "run.num_epochs": "9"}
    lines = check(flags, check_cluster=lambda config: "1 node, 2 CPUs")
    facts = dict(line.split(": ", 1) for line in lines)
    assert list(facts) == [
        *("loss", "learner", "model", "train", "eval", "run", "start", "reward", "cluster")
    ]
    assert facts["start"].strip() == "run run, 3 steps, 2 prompts"
    assert "tau 0.5" in facts["loss"]
    assert str(model) in facts["model"]
    template = len("user\n\nassistant\n") + 3  # a token per character, and special ones
    lengths = f"2 rows, prompts of {template + 3} to {template + 5} tokens (at most 1024)"
    assert lengths in facts["train"]
    assert lengths in facts["eval"]
    assert "exact_match" in facts["reward"]
    assert facts["cluster"].strip() == "1 node, 2 CPUs"


def test_without_eval_and_cluster(flags: dict[str, str]) -> None:
    lines = check(flags)
    assert any(line.startswith("eval: ") and "none" in line for line in lines)
    assert "none is up" in lines[-1]


def facts_of(flags: dict[str, str], line: str) -> str:
    return next(
        text.partition(": ")[2] for text in check(flags) if text.startswith(f"{line}:")
    ).strip()


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({}, "1 step of 8 prompts x 8 completions, at most 1 epoch of the training prompts"),
        (
            {"run.num_epochs": "9"},
            "3 steps of 8 prompts x 8 completions, at most 9 epochs of the training prompts",
        ),
        (
            {"run.num_epochs": "9", "data.drop_last": "true"},
            "2 steps of 8 prompts x 8 completions, at most 9 epochs of the training prompts",
        ),
        (
            {"run.num_steps": "3", "learner.prompts_per_step": "1"},
            "3 steps of 1 prompt x 8 completions, 1.5 passes over the training prompts",
        ),
        (
            {"run.num_steps": "100"},
            (
                "100 steps of 8 prompts x 8 completions, 400 passes over the training prompts, "
                "which are fewer than a step has, so that it takes prompts several times"
            ),
        ),
    ],
)
def test_the_length_of_the_run(flags: dict[str, str], keys: dict[str, str], facts: str) -> None:
    assert facts_of(flags | keys, "run") == f"{facts}, staleness up to 1"


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({}, "real, tau 0.5, positive above 0.0, pi_old behaviour, no KL"),
        (
            {"loss.labels": "group_mean", "loss.beta": "0.001", "loss.truncated": "exclude"},
            (
                "real, tau 0.5, positive above the mean of the group, pi_old behaviour, truncated "
                "completions excluded, KL 0.001 to the model as given"
            ),
        ),
        (
            {"loss.type": "real_bce", "loss.old_logprobs": "blend", "loss.blend_lambda": "0.3"},
            "real_bce, tau 0.5, positive above 0.0, pi_old blend (lambda 0.3), no KL",
        ),
        (
            {"loss.type": "dapo", "loss.epsilon": "0.1", "loss.old_logprobs": "proximal"},
            "dapo, clip range 0.1 below and default above, pi_old proximal, no KL",
        ),
    ],
)
def test_the_loss(flags: dict[str, str], keys: dict[str, str], facts: str) -> None:
    assert facts_of(flags | keys, "loss") == facts


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        (
            {},
            (
                "1 rank, ZeRO stage 2, bfloat16, all parameters, packed with shared prompts, up to "
                "16384 tokens a micro-batch, 1 mini-batch a step, learning rate 2e-06"
            ),
        ),
        (
            {
                "learner.num_ranks": "2",
                "learner.dtype": "float32",
                "learner.zero_stage": "3",
                "learner.offload_optimizer": "true",
                "learner.offload_params": "true",
                "learner.lora_rank": "16",
                "learner.packing": "false",
                "learner.share_prefix": "false",
                "learner.max_tokens_per_microbatch": "4096",
                "learner.minibatches_per_batch": "4",
            },
            (
                "2 ranks, ZeRO stage 3 (optimiser and parameters in CPU memory), float32, LoRA of "
                "rank 16 (merged to generators), padded rows, up to 4096 tokens a micro-batch, "
                "4 mini-batches a step, learning rate 2e-06"
            ),
        ),
        (
            {"learner.share_prefix": "false", "learner.lora_rank": "8"},
            (
                "1 rank, ZeRO stage 2, bfloat16, LoRA of rank 8 (merged to generators), packed, up "
                "to 16384 tokens a micro-batch, 1 mini-batch a step, learning rate 2e-06"
            ),
        ),
    ],
)
def test_the_learner(flags: dict[str, str], keys: dict[str, str], facts: str) -> None:
    assert facts_of(flags | keys, "learner") == facts


def test_the_deepspeed_file(flags: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": "auto", "overlap_comm": true}}')
    flags |= {"learner.deepspeed": str(path)}
    assert facts_of(flags, "learner").endswith(f"DeepSpeed settings of {path}")
    path.write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage is 3, and real-ray sets 2"):
        facts_of(flags, "learner")


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("model.name_or_path", "/no/model", ModelError),
        ("data.train", "/no/data.jsonl", DataError),
        ("data.eval", "/no/data.jsonl", DataError),
        ("data.answer_column", "solution", DataError),
        ("data.max_prompt_length", "3", DataError),
        ("reward.function", "exact_mach", ConfigError),
        ("learner.deepspeed", "/no/ds.json", ConfigError),
    ],
)
def test_what_is_wrong_is_found(
    flags: dict[str, str], key: str, value: str, error: type[UserError]
) -> None:
    with pytest.raises(error):
        check(flags | {key: value})


def test_a_run_without_a_step(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"has 2 prompts, .*learner\.prompts_per_step = 8"):
        check(flags | {"data.drop_last": "true"})


def test_a_checkpoint_that_does_not_fit(flags: dict[str, str]) -> None:
    def other_stage(config: Config, train: Sequence[Prompt]) -> str:
        raise CheckpointError("saved with learner.zero_stage = 3")

    with pytest.raises(CheckpointError, match="zero_stage = 3"):
        check(flags, check_start=other_stage)


def test_too_small_a_cluster(flags: dict[str, str]) -> None:
    with pytest.raises(ResourceError, match="the cluster has 2"):
        check(flags, check_cluster=full_cluster)
