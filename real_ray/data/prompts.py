"""From the rows of a source to tokenized prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from real_ray.config.data import DataConfig
from real_ray.data.sources import read_source
from real_ray.data.table import Table
from real_ray.errors import DataError, shown
from real_ray.nearest import did_you_mean
from real_ray.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


def load_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Literal["train", "eval"],
    seed: int,
) -> list[Prompt]:
    """Read, format and tokenize all prompts of ``data.train`` or ``data.eval``.

    The uid of a prompt is ``<source>:<row>``, rows counted from 0; `PromptCursor` adds the epoch.

    Args:
        data: where the prompts are, and their bounds.
        tokenizer: one with a chat template.
        split: which side of the run they are for.
        seed: of the built-in dataset; other sources ignore it.

    Returns:
        At least one prompt, in the order of the source.

    Raises:
        DataError: the source cannot be read, has no such column, or a row is bad; names the row.
    """
    source = data.train if split == "train" else data.eval
    if source is None:
        raise DataError("data.eval is not set, so there are no prompts to evaluate on")
    table = read_source(
        source,
        side=split,
        named_split=data.train_split if split == "train" else data.eval_split,
        seed=seed,
    )
    _check_columns(table, data)
    prompts: list[Prompt] = []
    for number, row in enumerate(table.rows):
        place = table.place(number)
        messages = _messages(row.get(data.prompt_column), data, place)
        text, token_ids = _apply_template(messages, tokenizer, place)
        if len(token_ids) > data.max_prompt_length:
            if data.long_prompts == "skip":
                continue
            raise DataError(
                f"{place}: the prompt has {len(token_ids)} tokens with the chat template, above "
                f"data.max_prompt_length = {data.max_prompt_length}. Raise that, shorten the "
                "prompt, or set data.long_prompts: skip"
            )
        prompts.append(
            Prompt(
                uid=f"{table.source}:{number}",
                text=text,
                token_ids=np.array(token_ids, dtype=np.int32),
                answer=_answer(row.get(data.answer_column), data, place),
                columns=row,
            )
        )
    _report_skipped(table, num_kept=len(prompts), bound=data.max_prompt_length)
    return prompts


def _check_columns(table: Table, data: DataConfig) -> None:
    for key in ("prompt_column", "answer_column"):
        name = getattr(data, key)
        if name not in table.columns:
            raise DataError(
                f"{table.source} has no column `{name}`{did_you_mean(name, table.columns)}; it "
                f"has: {', '.join(table.columns)}. Set data.{key}"
            )


def _messages(value: object, data: DataConfig, place: str) -> Messages:
    """Return the prompt as chat messages, with the system prompt of the config."""
    column = data.prompt_column
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{place}: column `{column}` (the prompt) is empty; remove or fill the row")
    if isinstance(value, str):
        messages: Messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and all(_is_message(item) for item in value):
        # Columnar formats fill absent keys with None, which templates take for present.
        messages = [{k: v for k, v in item.items() if v is not None} for item in value]
    else:
        raise DataError(
            f"{place}: column `{column}` (the prompt) must be text or a list of messages like "
            f'{{"role": "user", "content": "..."}}, got {shown(value)}'
        )
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: column `{column}` ends with an assistant message, which the policy would "
            "see as part of the prompt; remove it"
        )
    if data.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"{place}: column `{column}` has a system message of its own; unset data.system_prompt"
        )
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and all(
        isinstance(item.get(key), str) for key in ("role", "content")
    )


def _apply_template(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, place: str
) -> tuple[str, list[int]]:
    import jinja2

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text.encode()  # tokenizers' own error for half a surrogate pair explains nothing
        token_ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    except jinja2.TemplateError as error:
        raise DataError(
            f"{place}: the tokenizer's chat template refuses the prompt: {error}"
        ) from error
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: the prompt is not valid Unicode text: {error}") from error
    return text, token_ids


def _answer(value: object, data: DataConfig, place: str) -> str:
    column = data.answer_column
    is_nan = isinstance(value, float) and math.isnan(value)  # a missing cell in columnar formats
    if value is None or is_nan or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{place}: column `{column}` (the answer) is empty; remove or fill the row")
    if not isinstance(value, (str, Number)):
        raise DataError(
            f"{place}: column `{column}` (the answer) must be text or a number, got "
            f"{shown(value)}. A reward function reads other columns from its argument `columns`"
        )
    return str(value)


def _report_skipped(table: Table, *, num_kept: int, bound: int) -> None:
    num_rows = len(table.rows)
    if num_kept == num_rows:
        return
    if num_kept == 0:
        raise DataError(
            f"{table.source}: all {num_rows} prompts are longer than data.max_prompt_length = "
            f"{bound} tokens, so data.long_prompts: skip leaves none. Raise the bound"
        )
    logger.warning(
        "%s: skipped %d of %d prompts longer than data.max_prompt_length = %d tokens",
        table.source,
        num_rows - num_kept,
        num_rows,
        bound,
    )
