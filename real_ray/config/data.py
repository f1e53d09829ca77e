"""Section `data`: where prompts and answers come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from real_ray.config.base import Place, Section


class DataConfig(Section):
    train: Place = Field(
        description="Training prompts: `arithmetic` (built in), a .jsonl/.json/.csv/.parquet file, "
        "a directory of the datasets library, or a dataset name on the Hugging Face hub "
        "(`name:configuration` where it has several).",
    )
    train_split: str = Field("train", description="Split of a hub dataset to train on.")
    eval: Place | None = Field(
        None, description="Evaluation prompts, same forms as `train`; null: no evaluation."
    )
    eval_split: str = Field("test", description="Split of a hub dataset to evaluate on.")
    prompt_column: str = Field("prompt", min_length=1, description="Column of the prompt.")
    answer_column: str = Field("answer", min_length=1, description="Column of the answer.")
    system_prompt: str | None = Field(
        None, description="System message put before each prompt; null: the template's own."
    )
    max_prompt_length: int = Field(1024, ge=1, description="Longest prompt in tokens.")
    long_prompts: Literal["error", "skip"] = Field(
        "error", description="What to do with a prompt above `max_prompt_length`."
    )
    drop_last: bool = Field(
        False,
        description="Leave out the last prompts of the last epoch that do not fill a step; false: "
        "train a smaller step on them.",
    )
    shuffle: bool = Field(True, description="Shuffle each epoch, by `run.seed` and epoch.")
