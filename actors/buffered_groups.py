"""Buffered groups of a checkpoint: scored and not yet trained on, one file each.

Tensors are what the learner computes with, the metadata is JSON with the rest. Dataset columns are
not kept: they were for the reward.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from actors.checkpoint_files import DRIVER, GROUPS
from real_ray.checkpoint import BufferedGroup, DriverState, from_json
from real_ray.errors import CheckpointError, GroupError
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan


def write_groups(directory: Path, groups: Mapping[int, RolloutGroup]) -> None:
    """Write groups, by the number of their draw, into a checkpoint."""
    (directory / GROUPS).mkdir()
    for number, group in groups.items():
        _write_group(_file(directory, number), group)


def read_group(file: Path) -> RolloutGroup:
    """Read what `write_groups` wrote; equal to the bit, without dataset columns.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="numpy") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            return _group(tensors, json.loads(content.metadata()["group"]))
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, GroupError) as error:
        raise CheckpointError(
            f"{file}: the buffered group cannot be read: {error}. Use an earlier checkpoint"
        ) from error


def restore(directory: Path) -> DriverState:
    """Read the driver's state of a checkpoint, and put its groups into Ray's object store.

    Returns:
        The state, with references to the groups.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    file = directory / DRIVER
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Use an earlier checkpoint") from (
            error
        )
    state = from_json(text, place=str(file))
    buffered = tuple(_in_object_store(directory, group) for group in state.buffered)
    return dataclasses.replace(state, buffered=buffered)


def _in_object_store(directory: Path, buffered: BufferedGroup) -> BufferedGroup:
    group = read_group(_file(directory, buffered.number))
    ticket = dataclasses.replace(buffered.group, ref=ray.put(group))  # it has been scored
    return dataclasses.replace(buffered, group=ticket)


def _file(directory: Path, number: int) -> Path:
    return directory / GROUPS / f"{number}.safetensors"


def _write_group(file: Path, group: RolloutGroup) -> None:
    prompt, completions = group.sampled.prompt, group.sampled.completions
    spans = [[c.index, s.version, s.start, s.end] for c in completions for s in c.spans]
    tensors = {
        "prompt": prompt.token_ids,  # [P]
        "rewards": group.rewards,  # [N]
        "spans": np.array(spans, dtype=np.int64).reshape(-1, 4),  # member, version, start, end
    }
    for c in completions:
        tensors[f"token_ids.{c.index}"] = c.token_ids  # [T]
        tensors[f"generator_logprobs.{c.index}"] = c.generator_logprobs  # [T]
    texts = {
        "uid": prompt.uid,
        "text": prompt.text,
        "answer": prompt.answer,
        "completions": [{"text": c.text, "finish_reason": c.finish_reason} for c in completions],
    }
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, file, metadata={"group": json.dumps(texts)})


def _group(tensors: Mapping[str, Any], texts: Mapping[str, Any]) -> RolloutGroup:
    spans = tensors["spans"].tolist()
    completions = tuple(
        Completion(
            index=index,
            token_ids=tensors[f"token_ids.{index}"],
            generator_logprobs=tensors[f"generator_logprobs.{index}"],
            spans=tuple(
                VersionSpan(version=version, start=start, end=end)
                for member, version, start, end in spans
                if member == index
            ),
            text=member_texts["text"],
            finish_reason=member_texts["finish_reason"],
        )
        for index, member_texts in enumerate(texts["completions"])
    )
    prompt = Prompt(
        uid=texts["uid"],
        text=texts["text"],
        token_ids=tensors["prompt"],
        answer=texts["answer"],
    )
    return RolloutGroup(
        sampled=SampledGroup(
            prompt=prompt, num_generations=len(completions), completions=completions
        ),
        rewards=tensors["rewards"],
    )
