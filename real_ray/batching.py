"""Whole groups to ranks, to micro-batches by token budget, and to padded arrays."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from real_ray.errors import GroupError
from real_ray.types import Completion, FloatArray, RolloutGroup, check_whole_group

_MAX_LOGPROB = 1e-3  # rounding of the engine lifts log-probs of sure tokens a little above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Size of a group as padded rows.

    Example: ``GroupShape(num_members=8, prompt_tokens=30, completion_tokens=12)``
    """

    num_members: int
    prompt_tokens: int
    completion_tokens: int  # of the longest completion

    @classmethod
    def of(cls, group: RolloutGroup) -> GroupShape:
        return cls(
            num_members=group.sampled.num_generations,
            prompt_tokens=len(group.sampled.prompt.token_ids),
            completion_tokens=max(len(c.token_ids) for c in group.sampled.completions),
        )

    @property
    def padded_tokens(self) -> int:
        """Tokens of the group alone, padding included."""
        return self.num_members * (self.prompt_tokens + self.completion_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    """Rows of whole groups: prompts end, and completions start, at column ``P`` of every row.

    ``R`` rows, group-major (``R = G * num_generations``); ``P`` tokens of the longest prompt,
    ``C`` of the longest completion. Made by `collate`.

    Example, one group of 2, pad 0: prompt ``[5, 6]``, completions ``[7]`` and ``[8, 9]`` give
    ``input_ids = [[5, 6, 7, 0], [5, 6, 8, 9]]``.
    """

    input_ids: npt.NDArray[np.int64]  # [R, P + C]
    attention_mask: npt.NDArray[np.int64]  # [R, P + C], 1: a token, 0: padding
    position_ids: npt.NDArray[np.int64]  # [R, P + C], 0 at the first prompt token
    completion_mask: npt.NDArray[np.bool_]  # [R, C]
    generator_logprobs: FloatArray  # [R, C], 0 at padding
    rewards: FloatArray  # [G, num_generations]
    num_generations: int
    uids: tuple[str, ...]  # [G]
    oldest_version: npt.NDArray[np.int64]  # [R], oldest policy version among the row's tokens


def assign_to_ranks(group_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Spread whole groups over ranks with about equal tokens, the largest groups first.

    Args:
        group_tokens: padded tokens of each group, above 0; see `GroupShape.padded_tokens`.

    Returns:
        For each rank its groups, as ascending indices into ``group_tokens``. With fewer groups
        than ranks some ranks have none.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: it must be at least 1")
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(group_tokens)), key=lambda i: (-group_tokens[i], i)):
        tokens, rank = loads[0]
        ranks[rank].append(index)
        heapq.heapreplace(loads, (tokens + group_tokens[index], rank))
    return [sorted(rank) for rank in ranks]


def plan_microbatches(shapes: Sequence[GroupShape], max_tokens: int) -> list[list[int]]:
    """Split groups into micro-batches of whole groups within a budget of padded tokens.

    Groups are taken from long to short, so that neighbours need little padding and the largest
    micro-batch runs (or runs out of memory) first. A micro-batch costs its members times the
    longest prompt plus the longest completion in it. A group that alone exceeds the budget gets a
    micro-batch of its own.

    Returns:
        Micro-batches in the order to run them, each as ascending indices into ``shapes``.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: it must be at least 1")
    microbatches: list[list[int]] = []
    for index in sorted(range(len(shapes)), key=lambda i: (-_row_tokens(shapes[i]), i)):
        if microbatches and _padded([shapes[i] for i in [*microbatches[-1], index]]) <= max_tokens:
            microbatches[-1].append(index)
        else:
            microbatches.append([index])
    return [sorted(microbatch) for microbatch in microbatches]


def collate(groups: Sequence[RolloutGroup], pad_token_id: int) -> PaddedBatch:
    """Pad whole groups to one rectangle: prompts on the left, completions on the right.

    Raises:
        GroupError: a group is not whole, comes twice, or has another ``num_generations`` than the
            first; a prompt or completion has no tokens; generator log-probs are missing, not
            finite or above 0. Names the group's uid and the member.
    """
    if not groups:
        raise ValueError("there are no groups to collate")
    _check_groups(groups)
    rows = [(g.sampled.prompt.token_ids, c) for g in groups for c in g.sampled.completions]
    num_prompt = max(len(prompt) for prompt, _ in rows)
    num_completion = max(len(completion.token_ids) for _, completion in rows)

    input_ids = np.full((len(rows), num_prompt + num_completion), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    generator_logprobs = np.zeros((len(rows), num_completion), dtype=np.float32)
    for row, (prompt, completion) in enumerate(rows):
        start, stop = num_prompt - len(prompt), num_prompt + len(completion.token_ids)
        input_ids[row, start:num_prompt] = prompt
        input_ids[row, num_prompt:stop] = completion.token_ids
        attention_mask[row, start:stop] = 1
        generator_logprobs[row, : len(completion.token_ids)] = completion.generator_logprobs
    return PaddedBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=np.maximum(attention_mask.cumsum(axis=1) - 1, 0),
        completion_mask=attention_mask[:, num_prompt:].astype(bool),
        generator_logprobs=generator_logprobs,
        rewards=np.stack([g.rewards for g in groups]).astype(np.float32),
        num_generations=groups[0].sampled.num_generations,
        uids=tuple(g.uid for g in groups),
        oldest_version=np.array([c.oldest_version for _, c in rows], dtype=np.int64),
    )


def _row_tokens(shape: GroupShape) -> int:
    return shape.prompt_tokens + shape.completion_tokens


def _padded(shapes: Sequence[GroupShape]) -> int:
    width = max(s.prompt_tokens for s in shapes) + max(s.completion_tokens for s in shapes)
    return width * sum(s.num_members for s in shapes)


def _check_groups(groups: Sequence[RolloutGroup]) -> None:
    num_generations = groups[0].sampled.num_generations
    for uid, count in Counter(g.uid for g in groups).items():
        if count > 1:
            raise GroupError(f"group {uid} comes {count} times in one batch: train on it once")
    for group in groups:
        sampled = group.sampled
        if sampled.num_generations != num_generations:
            raise GroupError(
                f"group {group.uid} has num_generations {sampled.num_generations} but group "
                f"{groups[0].uid} has {num_generations}: all groups of a batch must agree"
            )
        check_whole_group(group.uid, [c.index for c in sampled.completions], num_generations)
        if len(sampled.prompt.token_ids) == 0:
            raise GroupError(f"group {group.uid}: the prompt has no tokens")
        for completion in sampled.completions:
            _check_completion(group.uid, completion)


def _check_completion(uid: str, completion: Completion) -> None:
    member = f"group {uid}, member {completion.index}"
    logprobs = completion.generator_logprobs
    if len(completion.token_ids) == 0:
        raise GroupError(f"{member}: the completion has no tokens; at least 1 is needed")
    if logprobs.shape != completion.token_ids.shape:
        raise GroupError(
            f"{member}: {logprobs.shape} generator log-probs for "
            f"{completion.token_ids.shape} tokens"
        )
    usable = np.isfinite(logprobs) & (logprobs <= _MAX_LOGPROB)
    if not usable.all():
        token = int(np.argmin(usable))
        raise GroupError(
            f"{member}: the generator log-prob of token {token} is {logprobs[token]}; it must be "
            "finite and not above 0"
        )
