"""A micro-batch as rows of one forward pass.

Shapes: ``R`` rows of ``L`` columns; ``M`` members with ``T`` completion tokens together, one member
after another in the order of the micro-batch's slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from real_ray.batching import Layout, Microbatch
from real_ray.policy.attention import Segments
from real_ray.types import Completion, IntArray, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyInput:
    """What a `Policy` runs: token rows, and which of its outputs are wanted.

    The last token of each completion is not run, since it predicts nothing that is wanted.
    """

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64
    attention_mask: Tensor | None  # [R, L] int64 of padded rows, 1: a token, 0: padding
    segments: Segments | None  # of packed rows; R is 1
    predicts: Tensor  # [T] int64, flat position (row * L + column) that predicts each token
    tokens: Tensor  # [T] int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionTokens:
    """What is known of the completion tokens of a micro-batch besides the policy's log-probs."""

    row: Tensor  # [T] int64, the member (0 .. M - 1) that a token belongs to
    group: Tensor  # [M] int64, position of its group in the optimiser step
    index: Tensor  # [M] int64, member of the group
    generator_logprobs: Tensor  # [T] float32
    version: Tensor  # [T] int64, policy version that sampled the token


def lay_out(
    microbatch: Microbatch,
    groups: Mapping[int, RolloutGroup],
    *,
    layout: Layout,
    pad_token_id: int,
    device: torch.device,
) -> tuple[PolicyInput, CompletionTokens]:
    """Bring the slices of a micro-batch into rows.

    Without slices the rows hold one sequence of two tokens, for a pass that counts for nothing.

    Args:
        groups: by their position in the optimiser step.
    """
    parts: list[tuple[IntArray, list[IntArray]]] = []
    members: list[tuple[int, Completion]] = []
    for part in microbatch:
        sampled = groups[part.group].sampled
        chosen = [sampled.completions[member] for member in part.members]
        parts.append((sampled.prompt.token_ids, [c.token_ids for c in chosen]))
        members += [(part.group, completion) for completion in chosen]
    if not parts:
        token = np.full(1, pad_token_id, dtype=np.int32)
        parts = [(token, [token])]
    rows = _padded(parts, pad_token_id) if layout == "padded" else _packed(
        parts, share_prefix=layout == "shared_prefix"
    )  # fmt: skip

    def tensor(values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)

    lengths = [len(completion.token_ids) for _, completion in members]
    policy_input = PolicyInput(
        input_ids=tensor(rows.input_ids),
        position_ids=tensor(rows.position_ids),
        attention_mask=None if rows.attention_mask is None else tensor(rows.attention_mask),
        segments=Segments(spans=tuple(rows.spans), device=device) if rows.spans else None,
        predicts=tensor(rows.predicts),
        tokens=tensor(np.concatenate([c for _, completions in parts for c in completions])),
    )
    return policy_input, CompletionTokens(
        row=tensor(np.repeat(np.arange(len(members)), lengths)),
        group=tensor([group for group, _ in members]),
        index=tensor([completion.index for _, completion in members]),
        generator_logprobs=tensor(
            np.concatenate([np.zeros(0), *(c.generator_logprobs for _, c in members)]),
            torch.float32,
        ),
        version=tensor(
            [s.version for _, c in members for s in c.spans for _ in range(s.start, s.end)]
        ),
    )


def one_sequence(token_ids: IntArray, *, layout: Layout, device: torch.device) -> PolicyInput:
    """A sequence alone in its row; every token but the first is wanted."""
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(device)
    length = len(ids) - 1
    positions = torch.arange(length, device=device)
    padded = layout == "padded"
    return PolicyInput(
        input_ids=ids[None, :-1],
        position_ids=positions[None],
        attention_mask=torch.ones_like(positions)[None] if padded else None,
        segments=None if padded else Segments(spans=((0, length, 0, 0),), device=device),
        predicts=positions,
        tokens=ids[1:],
    )


@dataclass(slots=True, kw_only=True)
class _Rows:
    input_ids: np.ndarray  # [R, L]
    position_ids: np.ndarray  # [R, L]
    attention_mask: np.ndarray | None
    spans: list[tuple[int, int, int, int]]
    predicts: np.ndarray  # [T]


def _packed(parts: list[tuple[IntArray, list[IntArray]]], *, share_prefix: bool) -> _Rows:
    ids: list[IntArray] = []
    positions: list[np.ndarray] = []
    spans: list[tuple[int, int, int, int]] = []
    predicts: list[np.ndarray] = []
    end = 0

    def add(tokens: IntArray, first_position: int, prefix: tuple[int, int]) -> int:
        nonlocal end
        start, end = end, end + len(tokens)
        if end > start:
            ids.append(tokens)
            positions.append(np.arange(first_position, first_position + len(tokens)))
            spans.append((start, end, *prefix))
        return start

    for prompt, completions in parts:
        num_prompt = len(prompt)
        if share_prefix:
            first = add(prompt, 0, (0, 0))
            for completion in completions:
                start = add(completion[:-1], num_prompt, (first, first + num_prompt))
                predicts.append(np.array([first + num_prompt - 1]))
                predicts.append(np.arange(start, end))
        else:
            for completion in completions:
                start = add(np.concatenate([prompt, completion[:-1]]), 0, (0, 0))
                predicts.append(np.arange(start + num_prompt - 1, end))
    return _Rows(
        input_ids=np.concatenate(ids)[None],
        position_ids=np.concatenate(positions)[None],
        attention_mask=None,
        spans=spans,
        predicts=np.concatenate(predicts),
    )


def _padded(parts: list[tuple[IntArray, list[IntArray]]], pad_token_id: int) -> _Rows:
    """Prompts end, and completions start, at the same column of every row."""
    rows = [(prompt, completion) for prompt, completions in parts for completion in completions]
    num_prompt = max(len(prompt) for prompt, _ in rows)
    width = num_prompt + max(len(completion) for _, completion in rows) - 1
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    predicts = []
    for row, (prompt, completion) in enumerate(rows):
        start, stop = num_prompt - len(prompt), num_prompt + len(completion) - 1
        input_ids[row, start:stop] = np.concatenate([prompt, completion[:-1]])
        attention_mask[row, start:stop] = 1
        predicts.append(row * width + np.arange(num_prompt - 1, stop))
    return _Rows(
        input_ids=input_ids,
        position_ids=np.maximum(attention_mask.cumsum(axis=1) - 1, 0),
        attention_mask=attention_mask,
        spans=[],
        predicts=np.concatenate(predicts),
    )
