"""Batches of rollout groups of a given shape, the same for a given seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from real_ray.types import (
    Completion,
    Prompt,
    RolloutGroup,
    RolloutTicket,
    SampledGroup,
    SampledTicket,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many tokens a batch has, and where.

    Example: ``Shape(num_groups=4, num_generations=8, prompt_tokens=34, completion_tokens=(2, 4),
    longest_completion=12)``
    """

    num_groups: int
    num_generations: int
    prompt_tokens: int  # of each prompt
    completion_tokens: tuple[int, int]  # fewest and most of a completion
    longest_completion: int | None = None  # tokens of one completion in every group


def make_batch(shape: Shape, *, vocabulary: int, seed: int) -> list[RolloutGroup]:
    """Random tokens, half of each group with reward 1, generator log-probs as of random guesses."""
    rng = np.random.default_rng(seed)
    return [_group(shape, index, vocabulary, rng) for index in range(shape.num_groups)]


def count_tokens(batch: list[RolloutGroup]) -> tuple[int, int]:
    """Completion tokens, and tokens of all sequences (a prompt counts for each completion)."""
    completion = sum(len(c.token_ids) for g in batch for c in g.sampled.completions)
    prompt = sum(len(g.sampled.prompt.token_ids) * g.sampled.num_generations for g in batch)
    return completion, prompt + completion


def ticket_of(group: RolloutGroup) -> RolloutTicket:
    """What the driver would know of the group."""
    completions = group.sampled.completions
    sampled = SampledTicket(
        uid=group.uid,
        prompt_tokens=len(group.sampled.prompt.token_ids),
        completion_tokens=tuple(len(c.token_ids) for c in completions),
        truncated=(False,) * len(completions),
        oldest_version=0,
        newest_version=0,
        seconds=0.0,
        generator="none",
        ref=None,
    )
    return RolloutTicket(
        sampled=sampled, rewards=tuple(group.rewards.tolist()), seconds=0.0, ref=None
    )


def _group(shape: Shape, index: int, vocabulary: int, rng: np.random.Generator) -> RolloutGroup:
    fewest, most = shape.completion_tokens
    lengths = rng.integers(fewest, most + 1, shape.num_generations)
    if shape.longest_completion is not None:
        lengths[rng.integers(shape.num_generations)] = shape.longest_completion
    completions = tuple(
        Completion(
            index=member,
            token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            generator_logprobs=-(math.log(vocabulary) + rng.random(length)).astype(np.float32),
            spans=(VersionSpan(version=0, start=0, end=int(length)),),
            text="",
            finish_reason="stop",
        )
        for member, length in enumerate(lengths)
    )
    prompt = Prompt(
        uid=f"bench:{index}@0",
        text="",
        token_ids=rng.integers(0, vocabulary, shape.prompt_tokens).astype(np.int32),
        answer="",
    )
    return RolloutGroup(
        sampled=SampledGroup(
            prompt=prompt, num_generations=shape.num_generations, completions=completions
        ),
        rewards=(np.arange(shape.num_generations) % 2).astype(np.float32),
    )
