"""What is wrong with a config is said with file, line, key, value, bound and fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from real_ray.config import Config, load_config
from real_ray.config.loader import Overrides
from real_ray.errors import ConfigError

Write = Callable[[str], Path]

REQUIRED = "model: {name_or_path: m}\ndata: {train: arithmetic}\n"
FLAGS = {"model.name_or_path": "m", "data.train": "arithmetic"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(text.encode())
        return path

    return write


def problems(path: Path | None, overrides: Overrides = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def only_problem(path: Path | None, overrides: Overrides = ()) -> str:
    found = problems(path, overrides)
    assert len(found) == 1, found
    return found[0]


def load_flags(**flags: str) -> Config:
    """``load_flags(loss__tau="0.3")``: a config of flags only."""
    return load_config(None, FLAGS | {k.replace("__", "."): v for k, v in flags.items()})


class TestValues:
    def test_file_values_replace_defaults(self, write: Write) -> None:
        config = load_config(write(REQUIRED + "loss: {tau: 0.3}\nrollout: {stop: [a, b]}\n"))
        assert config.loss.tau == 0.3
        assert config.rollout.stop == ["a", "b"]
        assert config.rollout.num_generations == 8

    def test_flags_replace_file_values_and_the_last_counts(self, write: Write) -> None:
        path = write(REQUIRED + "loss: {tau: 0.3}\n")
        assert load_config(path, {"loss.tau": "0.4"}).loss.tau == 0.4
        assert load_config(str(path), [("loss.tau", "0.4"), ("loss.tau", "1")]).loss.tau == 1.0

    @pytest.mark.parametrize("text", ["2e-6", "2E-6", "2.0e-6", "+2e-6", ".000002"])
    def test_floats_of_every_notation(self, write: Write, text: str) -> None:
        path = write(REQUIRED + f"learner: {{learning_rate: {text}}}\n")
        assert load_config(path).learner.learning_rate == 2e-6
        assert load_flags(learner__learning_rate=text).learner.learning_rate == 2e-6

    def test_whole_number_where_a_number_is_expected(self, write: Write) -> None:
        tau = load_config(write(REQUIRED + "loss: {tau: 1}\n")).loss.tau
        assert tau == 1.0
        assert isinstance(tau, float)

    @pytest.mark.parametrize("text", ["7", "on", "no", "true", "2e-6", "007", "2026-01-01"])
    def test_text_flags_stay_text(self, text: str) -> None:
        assert load_flags(run__name=text).run.name == text

    def test_list_flags_hold_text(self) -> None:
        assert load_flags(rollout__stop='[7, on, "\\n"]').rollout.stop == ["7", "on", "\n"]

    @pytest.mark.parametrize("text", ["on", "off", "yes", "no", "12:30:00", "2026-01-01", "010"])
    def test_words_that_yaml_1_1_converts_are_text(self, write: Write, text: str) -> None:
        assert load_config(write(f"{REQUIRED}run: {{name: r}}\neval: {{}}\n")).run.name == "r"
        path = write(f"model: {{name_or_path: {text}}}\ndata: {{train: arithmetic}}\n")
        assert load_config(path).model.name_or_path == text

    def test_null_flag_of_a_nullable_key(self, write: Write) -> None:
        path = write("model: {name_or_path: m}\ndata: {train: t, eval: e}\n")
        assert load_config(path, {"data.eval": "null"}).data.eval is None
        assert load_config(path, {"data.train": "null"}).data.train == "null"

    def test_no_environment_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        assert load_flags(run__output_dir="${HOME}/runs").run.output_dir == "${HOME}/runs"

    def test_json_is_yaml(self, write: Write) -> None:
        path = write('{"model": {"name_or_path": "\\ud83d\\ude00"}, "data": {"train": "t"}}')
        assert load_config(path).model.name_or_path == "\N{GRINNING FACE}"

    def test_byte_order_mark_and_anchors(self, write: Write) -> None:
        text = "\ufeff" + REQUIRED + "sync: {timeout_s: &t 5}\nreward: {timeout_s: *t}\n"
        assert load_config(write(text)).reward.timeout_s == 5.0


class TestFile:
    def test_missing_file_names_near_ones(self, write: Write, tmp_path: Path) -> None:
        near = write(REQUIRED)
        (tmp_path / "other.yaml").touch()
        missing = tmp_path / "rum.yaml"
        assert only_problem(missing) == f"{missing}: no such config file. Did you mean {near}?"
        assert str(near) in only_problem(tmp_path / "run")
        assert "Did you mean" not in only_problem(tmp_path / "unlike.yaml")

    def test_missing_directory(self, tmp_path: Path) -> None:
        path = tmp_path / "no" / "run.yaml"
        assert f"There is no directory {tmp_path / 'no'}" in only_problem(path)

    def test_directory(self, tmp_path: Path) -> None:
        assert only_problem(tmp_path).startswith(f"{tmp_path}: this is a directory")

    def test_unreadable(self, tmp_path: Path) -> None:
        loop = tmp_path / "run.yaml"
        loop.symlink_to(loop)
        assert only_problem(loop).startswith(f"{loop}: cannot be read: ")

    def test_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_bytes(REQUIRED.encode() + b"run: {output_dir: caf\xe9}\n")
        assert only_problem(path) == (
            f"{path}:3: not UTF-8 (got byte 0xe9). Save the file as UTF-8"
        )

    @pytest.mark.parametrize(
        ("text", "place", "what"),
        [
            ("loss:\n  tau: [1\nrun: {}\n", ":3:4", "expected ',' or ']'"),
            ("loss:\n\ttau: 1\n", ":2:1", "Indent with spaces, not tabs"),
            ("loss: {tau: 1}\n---\nrun: {}\n", ":2:1", "another document"),
            ("loss:\n  tau: !!python/object:os.system {}\n", ":2:8", "could not determine"),
            ("loss:\n  tau: !!int x\n", ":2:8", "invalid literal for int()"),
            ('loss:\n  type: "\\ud83d"\n', ":2:9", "no such value"),
            ("loss:\n  tau: !!bool x\n", ":2:8", "no such value: 'x'"),
            ("loss:\n  tau: " + "9" * 5000, ":2:8", "no such value"),
            ("loss:\n  ? [a]\n  : 1\n", ":2:5", "a key must be a single word"),
            ("loss:\n  tau: \x00\n", ":2:8", "not allowed"),
            ("loss: " + "[" * 600, "", "nested too deeply"),
            ("loss: *x\n", ":1:7", "undefined alias"),
        ],
        ids=lambda value: value[:20],
    )
    def test_not_yaml(self, write: Write, text: str, place: str, what: str) -> None:
        path = write(text)
        message = only_problem(path)
        assert message.startswith(f"{path}{place}: not valid YAML: ")
        assert what in message

    @pytest.mark.parametrize(
        ("text", "kind"), [("- loss\n", "a list"), ("loss\n", "a single value")]
    )
    def test_top_level_is_no_mapping(self, write: Write, text: str, kind: str) -> None:
        path = write(text)
        message = only_problem(path)
        assert message.startswith(f"{path}:1: the file must hold sections")
        assert f"got {kind}" in message

    @pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
    def test_empty_file_lacks_the_required_keys(self, write: Write, text: str) -> None:
        path = write(text)
        assert problems(path) == [
            f"{path}: {key}: is missing and has no default (allowed not empty). Add it"
            for key in ("model.name_or_path", "data.train")
        ]

    def test_repeated_keys_name_both_lines(self, write: Write) -> None:
        path = write(REQUIRED + "loss:\n  tau: 1\n  tau: 2\nrun: {}\nloss: {}\n")
        assert problems(path) == [
            f"{path}:5: loss.tau: repeated key, first on line 4. Keep one of the two",
            f"{path}:7: loss: repeated key, first on line 3. Keep one of the two",
        ]


class TestKeys:
    @pytest.mark.parametrize(
        ("text", "place", "fix"),
        [
            ("loss: {tua: 1}", "loss.tua", "Did you mean `loss.tau`"),
            ("lose: {tau: 1}", "lose", "Did you mean `loss`?"),
            ("trainer_args: {}", "trainer_args", "The sections are run, model, data"),
            ("loss: {xyz: 1}", "loss.xyz", "The keys of `loss` are loss.type, loss.tau"),
            ("num_generations: 8", "num_generations", "belongs to `rollout`. Use `rollout.num_gen"),
            ("loss: {temperature: 1}", "loss.temperature", "belongs to `rollout`"),
            ("loss.tau: 1", "loss.tau", "Write `loss:` and below it, indented, `tau:`"),
            ("per_device_train_batch_size: 8", "per_device_train_batch_size", "prompts_per_step`"),
            ("rollout: {max_new_tokens: 8}", "rollout.max_new_tokens", "max_completion_length`"),
            ("learner: {lr: 1}", "learner.lr", "Use `learner.learning_rate`"),
            ("group_size: 8", "group_size", "Use `rollout.num_generations`"),
            ("loss: {kl_coef: 0.1}", "loss.kl_coef", "Use `loss.beta`"),
            ("beta: 0.1", "beta", "belongs to `loss`. Use `loss.beta`"),
            ("scale_rewards: group", "scale_rewards", "labels (loss.labels)"),
            ("reward: {normalise_rewards: true}", "reward.normalise_rewards", "used as they are"),
            ("tis_threshold: 2", "tis_threshold", "Importance-sampling corrections"),
            ("loss: {teacher_model: m}", "loss.teacher_model", "There is no teacher"),
            ("loss: {overlong_filter: true}", "loss.overlong_filter", "Use `loss.truncated`"),
            ("1: 2", "1", "The sections are"),
        ],
    )
    def test_unknown_key(self, write: Write, text: str, place: str, fix: str) -> None:
        path = write(f"{REQUIRED}\n{text}\n")
        message = only_problem(path)
        assert message.startswith(f"{path}:4: {place}: unknown key. ")
        assert fix in message

    def test_unknown_flag(self) -> None:
        message = only_problem(None, FLAGS | {"loss.tua": "1"})
        assert message == "--loss.tua: unknown key. Did you mean `loss.tau`?"
        assert "model.name_or_path" in only_problem(None, FLAGS | {"model": "x"})

    @pytest.mark.parametrize(
        ("text", "key"),
        [("model: Qwen/Qwen3-1.7B", "model.name_or_path"), ("data: arithmetic", "data.train")],
    )
    def test_a_value_for_a_section(self, write: Write, text: str, key: str) -> None:
        section, _, value = text.partition(": ")
        rest = "".join(line + "\n" for line in REQUIRED.splitlines() if section not in line)
        path = write(f"{text}\n{rest}")
        assert only_problem(path) == (
            f'{path}:1: {section}: must be a section with keys below it (got "{value}"). '
            f"Write the value as `{key}`"
        )

    def test_an_empty_section(self, write: Write) -> None:
        path = write(REQUIRED + "loss:\n")
        assert only_problem(path) == (
            f"{path}:3: loss: must be a section with keys below it (got null). "
            "Give it keys, or remove the line"
        )
        assert only_problem(path, {"loss.tau": "1"}).startswith(f"{path}:3: loss: must be")

    def test_missing_key_of_a_section_names_its_line(self, write: Write) -> None:
        path = write("model: {name_or_path: m}\n\ndata:\n  eval: arithmetic\n")
        assert only_problem(path).startswith(f"{path}:3: data.train: is missing")

    def test_missing_flag(self) -> None:
        assert only_problem(None, {"data.train": "x"}).startswith(
            "--model.name_or_path: is missing and has no default"
        )


class TestBounds:
    @pytest.mark.parametrize(
        "case",
        [
            ("loss.tau", "0", "0", "too small", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "101", "101", "too large", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "true", "true", "must be a number", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "abc", '"abc"', "must be a number", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "", "null", "must be a number", "> 0, <= 100", "Give a value, or remove"),
            ("loss.tau", ".nan", "NaN", "not a finite number", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "1e400", "Infinity", "not a finite number", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "[1]", "a list of 1", "must be a number", "> 0, <= 100", "default 0.5"),
            ("loss.tau", "{a: 1}", "keys and values", "must be a number", "<= 100", "default 0.5"),
            ("loss.positive_above", "x", '"x"', "must be a number", "a number", "default 0.0"),
            ("rollout.num_generations", "1", "1", "too small", ">= 2", "default 8"),
            ("rollout.num_generations", "8.0", "8.0", "must be a whole number", ">= 2", "Write 8"),
            ("rollout.num_generations", "1_000", '"1_000"', "whole number", ">= 2", "Write 1000 "),
            ("rollout.num_generations", '"8"', '"8"', "whole number", ">= 2", "(no quotes or"),
            ("rollout.num_generations", "010", '"010"', "whole number", ">= 2", "Write 10 "),
            ("rollout.temperature", "0", "0", "too small", "> 0, <= 10", "default 0.6"),
            ("learner.warmup_ratio", "1", "1", "too large", ">= 0, < 1", "default 0.0"),
            ("learner.zero_stage", "4", "4", "too large", ">= 0, <= 3", "default 2"),
            ("learner.zero_stage", "true", "true", "whole number", ">= 0, <= 3", "default 2"),
            (
                "learner.learning_rate",
                '"2e-6"',
                '"2e-6"',
                "must be a number",
                "<= 1",
                "Write 2e-06",
            ),
            (
                "run.overwrite",
                "yes",
                '"yes"',
                "must be true or false",
                "true or false",
                "Write true",
            ),
            ("run.overwrite", "0", "0", "must be true or false", "true or false", "Write false"),
            (
                "run.overwrite",
                "x",
                '"x"',
                "must be true or false",
                "true or false",
                "default false",
            ),
            ("rollout.stop", "x", '"x"', "must be a list of texts", "a list of texts", "[a, b]"),
            ("learner.lora_target_modules", "[]", "a list of 0", "short", "not empty", "[a, b]"),
            ("learner.lora_rank", "513", "513", "too large", ">= 0, <= 512", "default 0"),
            ("learner.minibatches_per_batch", "0", "0", "too small", ">= 1", "default 1"),
            ("loss.beta", "-1", "-1", "too small", ">= 0, <= 100", "default 0.0"),
            ("loss.epsilon", "1", "1", "too large", "> 0, < 1", "default null"),
            ("checkpoint.save_steps", "0", "0", "too small", ">= 1", "default 100"),
            (
                "rollout.max_model_length",
                "x",
                '"x"',
                "a whole number or null",
                ">= 2",
                "default null",
            ),
        ],
    )
    def test_same_in_file_and_flag(self, write: Write, case: tuple[str, ...]) -> None:
        key, value, got, what, allowed, fix = case
        section, _, field = key.partition(".")
        path = write(f"{REQUIRED}{section}:\n  {field}: {value}\n")
        for message, place in (
            (only_problem(path), f"{path}:4: {key}: "),
            (only_problem(None, FLAGS | {key: value}), f"--{key}: "),
            (only_problem(path, {key: value}), f"--{key}: "),
        ):
            assert message.startswith(place)
            assert what in message
            assert f"(got {got}; allowed " in message
            assert f"{allowed}). " in message
            assert fix in message

    @pytest.mark.parametrize("value", ["7", "true", "2e-6", "1.10"])
    def test_text_in_a_file_needs_quotes(self, write: Write, value: str) -> None:
        path = write(f"{REQUIRED}run: {{name: {value}}}\n")
        message = only_problem(path)
        assert message.startswith(f"{path}:3: run.name: must be text (got ")
        assert message.endswith("Put it in quotes")
        assert load_config(write(f'{REQUIRED}run: {{name: "{value}"}}\n')).run.name == value

    def test_items_of_a_list(self, write: Write) -> None:
        path = write(f"{REQUIRED}rollout:\n  stop:\n    - a\n    - 1\n")
        assert only_problem(path) == (
            f"{path}:6: rollout.stop[1]: must be text (got 1). Put it in quotes"
        )

    def test_empty_items_of_a_list(self, write: Write) -> None:
        path = write(f"{REQUIRED}learner:\n  lora_target_modules:\n    - ''\n")
        assert only_problem(path) == (
            f"{path}:5: learner.lora_target_modules[0]: is empty. Write text, or remove the item"
        )

    def test_choices(self, write: Write) -> None:
        path = write(REQUIRED + "cluster: {device: gpu}\nrollout: {dtype: bf16}\n")
        first, second = problems(path)
        assert first.startswith(f"{path}:4: rollout.dtype: is not one of the choices")
        assert "Did you mean bfloat16?" in first
        assert "allowed one of auto, bfloat16, float32" in first
        assert "allowed one of auto, cpu, cuda" in second

    @pytest.mark.parametrize(
        ("key", "value", "allowed"),
        [
            ("run.name", "../x", "letters, digits and . _ -, starting with a letter or digit"),
            ("run.name", "x" * 101, "at most 100 characters"),
            ("data.train", "", "not empty"),
            ("learner.deepspeed", "", "not empty"),
        ],
    )
    def test_text(self, key: str, value: str, allowed: str) -> None:
        message = only_problem(None, FLAGS | {key: value})
        assert message.startswith(f"--{key}: ")
        assert allowed in message

    def test_long_values_are_cut(self) -> None:
        assert len(only_problem(None, FLAGS | {"loss.tau": "x" * 10_000})) < 300

    def test_flag_that_is_not_yaml(self) -> None:
        message = only_problem(None, FLAGS | {"loss.tau": "[1"})
        assert message.startswith("--loss.tau: not valid YAML: ")

    def test_rules_over_several_keys(self, write: Write) -> None:
        path = write(REQUIRED + "rollout:\n  temperature: 1\n  top_k: 5\n")
        message = only_problem(path)
        assert message.startswith(f"{path}:5: rollout.top_k: ")
        assert "rollout.allow_truncated_sampling: true" in message
        path = write(REQUIRED + "rollout:\n  max_model_length: 100\n")
        assert only_problem(path).startswith(f"{path}:4: rollout.max_model_length: ")
        message = only_problem(None, FLAGS | {"rollout.max_model_length": "100"})
        assert message.startswith("--rollout.max_model_length: ")
        assert "data.max_prompt_length + rollout.max_completion_length = 1536" in message

    @pytest.mark.parametrize(
        ("keys", "place", "words"),
        [
            (
                {"loss.epsilon": 0.2},
                "loss.epsilon",
                "loss.type real has no importance ratio and clips nothing. Remove loss.epsilon",
            ),
            (
                {"loss.type": "real_bce", "loss.epsilon_high": 0.3},
                "loss.epsilon_high",
                "use loss.type grpo, dapo or gspo",
            ),
            (
                {"learner.prompts_per_step": 8, "learner.minibatches_per_batch": 3},
                "learner.minibatches_per_batch",
                "= 3 does not divide prompts_per_step = 8",
            ),
            (
                {"learner.packing": False},
                "learner.packing",
                "set learner.share_prefix: false too",
            ),
            (
                {"learner.zero_stage": 0, "learner.offload_optimizer": True},
                "learner.offload_optimizer",
                "needs learner.zero_stage 1, 2 or 3",
            ),
            (
                {"learner.offload_params": True},
                "learner.offload_params",
                "needs learner.zero_stage 3 (zero_stage is 2)",
            ),
            (
                {"learner.lora_sync": "adapter"},
                "learner.lora_sync",
                "set learner.lora_rank above 0, or learner.lora_sync: merged",
            ),
            (
                {"learner.lora_target_modules": ["all-linear", "q_proj"]},
                "learner.lora_target_modules",
                "give [all-linear] alone",
            ),
            (
                {"data.max_prompt_length": 600, "learner.max_tokens_per_microbatch": 1000},
                "learner.max_tokens_per_microbatch",
                "= 1000 cannot hold one sequence of data.max_prompt_length = 600 and rollout.",
            ),
            ({"eval.every": 5}, "eval.every", "and data.eval is null. Give data.eval, or remove"),
            (
                {"rollout.oversample": 2.5},
                "rollout.oversample",
                "rollout.max_staleness = 1 versions late. Raise max_staleness to 2, or lower",
            ),
            (
                {"rollout.max_completion_length": 20000},
                "rollout.max_completion_length",
                "rollout.max_completion_length = 20000 tokens. Raise it to 21024 or more",
            ),
        ],
    )
    def test_keys_that_do_not_go_together(
        self, write: Write, keys: dict[str, object], place: str, words: str
    ) -> None:
        values: dict[str, dict[str, object]] = {
            "model": {"name_or_path": "m"},
            "data": {"train": "arithmetic"},
        }
        for name, value in keys.items():
            section, _, field = name.partition(".")
            values.setdefault(section, {})[field] = value
        path = write(yaml.safe_dump(values))
        flags = {name: yaml.safe_dump(v).removesuffix("\n...\n") for name, v in keys.items()}
        for message, start in (
            (only_problem(path), f"{path}:"),
            (only_problem(None, FLAGS | flags), "--"),
        ):
            assert re.match(rf"{re.escape(start)}(\d+: )?{re.escape(place)}: ", message)
            assert words in message

    @pytest.mark.parametrize(
        "key",
        ["run.output_dir", "model.name_or_path", "data.train", "data.eval", "checkpoint.resume"],
    )
    def test_the_home_of_nobody(self, key: str) -> None:
        message = only_problem(None, FLAGS | {key: "~no-such-user/place"})
        assert message == (
            f"--{key}: `~no-such-user` has no home directory here. Write the path out"
        )
        load_config(None, FLAGS | {key: "~/place"})

    @pytest.mark.parametrize(
        "keys",
        [
            {"learner.prompts_per_step": "8", "learner.minibatches_per_batch": "4"},
            {"learner.packing": "false", "learner.share_prefix": "false"},
            {"learner.zero_stage": "1", "learner.offload_optimizer": "true"},
            {"learner.zero_stage": "3", "learner.offload_params": "true"},
            {"learner.zero_stage": "3", "learner.lora_rank": "8"},
            {"learner.lora_rank": "8", "learner.lora_sync": "adapter"},
            {"learner.lora_target_modules": "[q_proj, v_proj]"},
            {"learner.max_tokens_per_microbatch": "1536"},
            {"loss.type": "gspo", "loss.epsilon": "3e-4", "loss.epsilon_high": "4e-4"},
            {"loss.labels": "group_mean", "loss.positive_above": "0.5"},
            {"loss.type": "grpo", "loss.truncated": "exclude", "loss.tau": "0.1"},
        ],
    )
    def test_keys_that_go_together(self, keys: dict[str, str]) -> None:
        load_config(None, FLAGS | keys)


def test_all_problems_at_once(write: Write) -> None:
    path = write("model: {name_or_path: m, name_or_path: n}\nloss: {tau: 0, tua: 1}\nlr: 2\n")
    found = problems(path, {"lr": "1", "run.seed": "-1", "loss.type": "[", "run.num_steps": "["})
    places = [line.partition(": ")[0] for line in found]
    assert places == [
        f"{path}:1",
        "--lr",
        "--run.num_steps",
        "--run.seed",
        f"{path}",
        "--loss.type",
        f"{path}:2",
        f"{path}:2",
        f"{path}:3",
    ]
