"""Micro-batches as rows: three layouts of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from real_ray.batching import Layout, Microbatch, Slice
from real_ray.policy import CompletionTokens, PolicyInput, lay_out, one_sequence
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan

CPU = torch.device("cpu")
PAD = 99
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def group_of(prompt: Sequence[int], *completions: Sequence[int]) -> RolloutGroup:
    """Generator log-probs are -token / 8, and the first token is of version 3, the rest of 4."""
    members = tuple(
        Completion(
            index=index,
            token_ids=np.array(tokens, dtype=np.int32),
            generator_logprobs=-np.array(tokens, dtype=np.float32) / 8,
            spans=(
                VersionSpan(version=3, start=0, end=1),
                VersionSpan(version=4, start=1, end=len(tokens)),
            ),
            text="",
            finish_reason="stop",
        )
        for index, tokens in enumerate(completions)
    )
    token_ids = np.array(prompt, dtype=np.int32)
    return RolloutGroup(
        sampled=SampledGroup(
            prompt=Prompt(uid="a", text="", token_ids=token_ids, answer=""),
            num_generations=len(members),
            completions=members,
        ),
        rewards=np.zeros(len(members), dtype=np.float32),
    )


GROUPS = {0: group_of([5, 6], [7], [8, 9, 10], [11, 12]), 4: group_of([1, 2, 3], [4, 13], [14])}
MICROBATCH = (Slice(group=0, members=(0, 1)), Slice(group=4, members=(0,)))


def lay(microbatch: Microbatch, layout: Layout) -> tuple[PolicyInput, CompletionTokens]:
    return lay_out(microbatch, GROUPS, layout=layout, pad_token_id=PAD, device=CPU)


def test_padded() -> None:
    inputs, _ = lay(MICROBATCH, "padded")
    assert inputs.input_ids.tolist() == [
        [PAD, 5, 6, PAD, PAD],
        [PAD, 5, 6, 8, 9],
        [1, 2, 3, 4, PAD],
    ]
    assert inputs.position_ids.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 3]]
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert inputs.segments is None
    assert inputs.predicts.tolist() == [2, 7, 8, 9, 12, 13]
    assert inputs.tokens.tolist() == [7, 8, 9, 10, 4, 13]


def test_packed() -> None:
    inputs, _ = lay(MICROBATCH, "packed")
    assert inputs.input_ids.tolist() == [[5, 6, 5, 6, 8, 9, 1, 2, 3, 4]]
    assert inputs.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert inputs.attention_mask is None
    assert inputs.segments is not None
    assert inputs.segments.spans == ((0, 2, 0, 0), (2, 6, 0, 0), (6, 10, 0, 0))
    assert inputs.predicts.tolist() == [1, 3, 4, 5, 8, 9]
    assert inputs.tokens.tolist() == [7, 8, 9, 10, 4, 13]


def test_shared_prefix() -> None:
    inputs, _ = lay((*MICROBATCH[:1], Slice(group=4, members=(0, 1))), "shared_prefix")
    assert inputs.input_ids.tolist() == [[5, 6, 8, 9, 1, 2, 3, 4]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert inputs.attention_mask is None
    assert inputs.segments is not None
    assert inputs.segments.spans == ((0, 2, 0, 0), (2, 4, 0, 2), (4, 7, 0, 0), (7, 8, 4, 7))
    assert inputs.predicts.tolist() == [1, 1, 2, 3, 6, 7, 6]
    assert inputs.tokens.tolist() == [7, 8, 9, 10, 4, 13, 14]


@each_layout
def test_what_is_known_of_the_tokens(layout: Layout) -> None:
    _, known = lay((Slice(group=0, members=(1, 2)), Slice(group=4, members=(1,))), layout)
    assert known.row.tolist() == [0, 0, 0, 1, 1, 2]
    assert known.group.tolist() == [0, 0, 4]
    assert known.index.tolist() == [1, 2, 1]
    assert known.version.tolist() == [3, 4, 4, 3, 4, 3]
    assert (known.generator_logprobs * -8).tolist() == [8, 9, 10, 11, 12, 14]
    dtypes = {known.row.dtype, known.group.dtype, known.index.dtype, known.version.dtype}
    assert dtypes == {torch.int64}
    assert known.generator_logprobs.dtype == torch.float32


@each_layout
def test_completions_of_one_token_run_nothing_but_their_prompt(layout: Layout) -> None:
    inputs, _ = lay((Slice(group=0, members=(0,)),), layout)
    assert inputs.input_ids.tolist() == [[5, 6]]
    assert inputs.predicts.tolist() == [1]
    assert inputs.tokens.tolist() == [7]
    if inputs.segments is not None:
        assert inputs.segments.spans == ((0, 2, 0, 0),)


@each_layout
def test_a_microbatch_without_slices_runs_one_token_that_counts_for_nobody(layout: Layout) -> None:
    inputs, known = lay((), layout)
    assert inputs.input_ids.tolist() == [[PAD]]
    assert inputs.position_ids.tolist() == [[0]]
    assert inputs.predicts.tolist() == [0]
    assert inputs.tokens.tolist() == [PAD]
    tensors = (known.row, known.group, known.index, known.generator_logprobs, known.version)
    assert [len(tensor) for tensor in tensors] == [0] * 5
    assert known.generator_logprobs.dtype == torch.float32


@st.composite
def microbatches(draw: st.DrawFn) -> tuple[Microbatch, dict[int, RolloutGroup]]:
    lengths = st.integers(1, 6)
    positions = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(sorted))
    groups = {
        position: make_group(
            str(position),
            prompt_length=draw(lengths),
            lengths=draw(st.lists(lengths, min_size=3, max_size=3)),
            rewards=[0.0] * 3,
            vocab_size=PAD + 1,  # padding is a token like others
        )
        for position in positions
    }
    chosen = st.sets(st.sampled_from(range(3)), min_size=1).map(sorted).map(tuple)
    return tuple(Slice(group=g, members=draw(chosen)) for g in positions), groups


@given(microbatches())
def test_all_layouts_predict_the_same_tokens_from_the_same_contexts(
    drawn: tuple[Microbatch, dict[int, RolloutGroup]],
) -> None:
    """The context of a token, read back from masks and segments, is the sequence before it."""
    microbatch, groups = drawn
    contexts, tokens = [], []
    for part in microbatch:
        sampled = groups[part.group].sampled
        for member in part.members:
            completion = sampled.completions[member].token_ids
            for t, token in enumerate(completion):
                contexts.append([*sampled.prompt.token_ids, *completion[:t]])
                tokens.append(token)
    for layout in LAYOUTS:
        inputs, known = lay_out(microbatch, groups, layout=layout, pad_token_id=PAD, device=CPU)
        assert inputs.tokens.tolist() == tokens
        assert len(known.row) == len(known.version) == len(known.generator_logprobs) == len(tokens)
        assert [context_of(inputs, int(p)) for p in inputs.predicts] == contexts


def context_of(inputs: PolicyInput, position: int) -> list[int]:
    """Tokens up to a flat position that it attends to, in the order of their position ids."""
    row, column = divmod(position, inputs.input_ids.shape[1])
    if inputs.segments is not None:
        (a, _, c, d) = next(s for s in inputs.segments.spans if s[0] <= column < s[1])
        seen = [*range(c, d), *range(a, column + 1)]
    else:
        assert inputs.attention_mask is not None
        seen = [k for k in range(column + 1) if inputs.attention_mask[row, k]]
    assert inputs.position_ids[row, seen].tolist() == list(range(len(seen)))
    return inputs.input_ids[row, seen].tolist()


def test_versions_may_change_anywhere() -> None:
    completion = replace(
        GROUPS[0].sampled.completions[1],
        spans=(
            VersionSpan(version=7, start=0, end=0),
            VersionSpan(version=8, start=0, end=2),
            VersionSpan(version=11, start=2, end=3),
        ),
        index=0,
    )
    sampled = replace(GROUPS[0].sampled, num_generations=1, completions=(completion,))
    group = RolloutGroup(sampled=sampled, rewards=np.zeros(1, dtype=np.float32))
    _, known = lay_out(
        (Slice(group=0, members=(0,)),), {0: group}, layout="packed", pad_token_id=PAD, device=CPU
    )
    assert known.version.tolist() == [8, 8, 11]


@each_layout
def test_one_sequence_alone(layout: Layout) -> None:
    inputs = one_sequence(np.array([5, 6, 7, 8], dtype=np.int32), layout=layout, device=CPU)
    assert inputs.input_ids.tolist() == [[5, 6, 7]]
    assert inputs.position_ids.tolist() == [[0, 1, 2]]
    assert inputs.predicts.tolist() == [0, 1, 2]
    assert inputs.tokens.tolist() == [6, 7, 8]
    if layout == "padded":
        assert inputs.segments is None
        assert inputs.attention_mask is not None
        assert inputs.attention_mask.tolist() == [[1, 1, 1]]
    else:
        assert inputs.attention_mask is None
        assert inputs.segments is not None
        assert inputs.segments.spans == ((0, 3, 0, 0),)
