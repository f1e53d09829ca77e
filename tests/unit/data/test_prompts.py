import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_model

from real_ray.config.data import DataConfig
from real_ray.data import load_prompts
from real_ray.errors import DataError
from real_ray.types import Prompt

TOKENIZER = tiny_model.build_tokenizer()


def load(tmp_path: Path, *rows: dict[str, Any], **config: Any) -> list[Prompt]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(DataConfig(train=str(path), **config), TOKENIZER, split="train", seed=0)


def test_a_prompt_is_the_templated_text_and_its_token_ids(tmp_path: Path) -> None:
    row = {"prompt": "1 + 1?", "answer": "2", "level": 3}
    (prompt,) = load(tmp_path, row)
    assert prompt.text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(prompt.token_ids) == prompt.text
    assert prompt.token_ids.dtype == "int32"
    assert list(prompt.token_ids).count(TOKENIZER.convert_tokens_to_ids("<|im_start|>")) == 2
    assert prompt.uid == f"{tmp_path}/rows.jsonl:0"
    assert (prompt.answer, prompt.columns) == ("2", row)


def test_the_system_prompt_comes_first(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, {"prompt": "hi", "answer": "2"}, system_prompt="Be brief.")
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<")


def test_a_list_of_messages_is_a_prompt(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "1 + 1?"},
    ]
    (prompt,) = load(tmp_path, {"prompt": messages, "answer": "2"})
    assert prompt.text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes?<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_template_does_not_see_keys_that_a_columnar_format_filled_in(tmp_path: Path) -> None:
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = "{{ messages[0].keys() | join(' ') }}"
    path = tmp_path / "rows.jsonl"
    message = {"role": "user", "content": "hi", "tool_calls": None}
    path.write_text(json.dumps({"prompt": [message], "answer": "2"}))
    (prompt,) = load_prompts(DataConfig(train=str(path)), tokenizer, split="train", seed=0)
    assert prompt.text == "role content"


@pytest.mark.parametrize(("value", "text"), [(17, "17"), (2.5, "2.5"), (0, "0"), (" x ", " x ")])
def test_answers_become_text(tmp_path: Path, value: object, text: str) -> None:
    assert load(tmp_path, {"prompt": "p", "answer": value})[0].answer == text


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": "s"}
    (prompt,) = load(tmp_path, row, prompt_column="problem", answer_column="solution")
    assert prompt.answer == "s"


GOOD = {"prompt": "p", "answer": "a"}
SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        ({"prompt": None, "answer": "a"}, {}, r"column `prompt` \(the prompt\) is empty"),
        ({"prompt": " \n", "answer": "a"}, {}, r"column `prompt` \(the prompt\) is empty"),
        ({"prompt": [], "answer": "a"}, {}, r"column `prompt` \(the prompt\) is empty"),
        ({"answer": "a"}, {}, r"column `prompt` \(the prompt\) is empty"),
        ({"prompt": "p", "answer": None}, {}, r"column `answer` \(the answer\) is empty"),
        ({"prompt": "p", "answer": " "}, {}, r"column `answer` \(the answer\) is empty"),
        ({"prompt": "p", "answer": float("nan")}, {}, r"column `answer` \(the answer\) is empty"),
        ({"prompt": "p", "answer": ["a"]}, {}, r"must be text or a number, got list \['a'\]"),
        ({"prompt": 7, "answer": "a"}, {}, r"text or a list of messages .* got int 7"),
        ({"prompt": ["u"], "answer": "a"}, {}, r"text or a list of messages .* got list"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, {}, r"text or a list of messages"),
        (
            {"prompt": [USER, {"role": "assistant", "content": "a"}], "answer": "a"},
            {},
            r"ends with an assistant message",
        ),
        (
            {"prompt": [SYSTEM, USER], "answer": "a"},
            {"system_prompt": "t"},
            r"a system message of its own; unset data\.system_prompt",
        ),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(
    tmp_path: Path, row: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}"):
        load(tmp_path, GOOD, row, **config)


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* refuses the prompt: roles must alt"):
        load_prompts(DataConfig(train=str(path)), tokenizer, split="train", seed=0)


def test_text_that_is_no_unicode_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
        load(tmp_path, GOOD, {"prompt": "broken \ud83d emoji", "answer": "a"})


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"no column `prompts` \(did you mean `prompt`\?\); it has: prompt, answer\. "
        r"Set data\.prompt_column",
    ):
        load(tmp_path, GOOD, prompt_column="prompts")
    with pytest.raises(DataError, match=r"no column `solution`; .* Set data\.answer_column"):
        load(tmp_path, GOOD, answer_column="solution")


def test_a_long_prompt_is_refused_with_its_length(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "answer": "a"} for n in (10, 11)]
    length = len(load(tmp_path, rows[0])[0].token_ids)
    assert len(load(tmp_path, rows[0], max_prompt_length=length)) == 1
    with pytest.raises(
        DataError,
        match=rf"rows\.jsonl:2: the prompt has {length + 1} tokens .* above "
        rf"data\.max_prompt_length = {length}\. Raise .* data\.long_prompts: skip",
    ):
        load(tmp_path, *rows, max_prompt_length=length)


def test_long_prompts_are_skipped_and_counted_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "x" * n, "answer": str(n)} for n in (200, 1, 300, 2)]
    with caplog.at_level(logging.WARNING, "real_ray.data"):
        prompts = load(tmp_path, *rows, max_prompt_length=100, long_prompts="skip")
    assert [(p.answer, p.uid[-2:]) for p in prompts] == [("1", ":1"), ("2", ":3")]
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("real_ray")]
    assert "skipped 2 of 4 prompts" in message
    with pytest.raises(DataError, match=r"all 4 prompts are longer than .* = 5 tokens"):
        load(tmp_path, *rows, max_prompt_length=5, long_prompts="skip")


def test_arithmetic_has_its_own_column_names() -> None:
    config = DataConfig(train="arithmetic", prompt_column="problem")
    with pytest.raises(DataError, match=r"arithmetic has no column `problem`.*prompt, answer"):
        load_prompts(config, TOKENIZER, split="train", seed=0)


def test_evaluation_prompts_come_from_their_own_source() -> None:
    config = DataConfig(train="arithmetic", eval="arithmetic")
    train, held_out = (load_prompts(config, TOKENIZER, split=s, seed=3) for s in ("train", "eval"))
    assert (len(train), len(held_out)) == (68, 32)
    assert not {p.text for p in train} & {p.text for p in held_out}
    with pytest.raises(DataError, match=r"data\.eval is not set"):
        load_prompts(DataConfig(train="arithmetic"), TOKENIZER, split="eval", seed=0)
