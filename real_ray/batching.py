"""Groups to ranks and to micro-batches within a token budget."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from real_ray.errors import GroupError
from real_ray.types import Completion, RolloutGroup, check_whole_group

Layout = Literal["padded", "packed", "shared_prefix"]
"""How sequences become rows of a forward pass: one padded row each; one row for all, one after
another; or that, with the prompt of a group once for all its completions."""

_MAX_LOGPROB = 1e-3  # rounding of the engine lifts log-probs of sure tokens a little above 0
_WORTH_CUTTING = 4 / 3  # passes without gradients, for the scores, cost up to a third of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Size of a group in tokens.

    Example: ``GroupShape(uid="sums.jsonl:17@0", prompt_tokens=30, completion_tokens=(12, 3, 7))``
    """

    uid: str
    prompt_tokens: int
    completion_tokens: tuple[int, ...]  # of each member, at least 1

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(len(self.completion_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some members of a group.

    Example: ``Slice(group=2, members=(0, 3))``
    """

    group: int  # position in the optimiser step
    members: tuple[int, ...]  # ascending


Microbatch = tuple[Slice, ...]
"""What one forward pass runs; without slices it only keeps a rank in step with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who runs what in an optimiser step. Made by `plan_step`."""

    ranks: tuple[tuple[Microbatch, ...], ...]  # equally many micro-batches for each rank
    cut: frozenset[int]  # groups whose members are in more than one micro-batch

    def score_passes(self, rank: int) -> tuple[Microbatch, ...]:
        """Micro-batches of a rank that run an extra time, to score parts of cut groups beforehand.

        The first is not among them: all scores are known by the time of its backward pass if the
        others are by the time of its forward pass. Equally many for each rank.
        """
        passes = [[m for m in rank[1:] if self._cuts(m)] for rank in self.ranks]
        return tuple(passes[rank]) + ((),) * (max(map(len, passes)) - len(passes[rank]))

    def _cuts(self, microbatch: Microbatch) -> bool:
        return any(part.group in self.cut for part in microbatch)


def plan_step(
    shapes: Sequence[GroupShape], *, num_ranks: int, max_tokens: int, layout: Layout
) -> StepPlan:
    """Spread the groups of an optimiser step over ranks and micro-batches.

    Groups stay whole as long as the budget has room for them and cutting some would not relieve
    the busiest rank by more than a quarter. Packed, no rank has more than 4/3 (mean + longest
    sequence) tokens, prompts counted once a completion. Each rank's largest micro-batch runs (or
    runs out of memory) first.

    Args:
        max_tokens: most tokens of a micro-batch, padding included.

    Raises:
        GroupError: a sequence alone is longer than ``max_tokens``; names the group's uid.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: it must be at least 1")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: it must be at least 1")
    ranks = [
        _fill(slices, shapes, max_tokens, layout) for slices in _spread(shapes, num_ranks, layout)
    ]
    most = max(map(len, ranks))
    pieces = Counter(part.group for rank in ranks for microbatch in rank for part in microbatch)
    return StepPlan(
        ranks=tuple(tuple(rank) + ((),) * (most - len(rank)) for rank in ranks),
        cut=frozenset(group for group, count in pieces.items() if count > 1),
    )


def num_tokens(microbatch: Sequence[Slice], shapes: Sequence[GroupShape], layout: Layout) -> int:
    """Tokens, padding included, of a forward pass over these slices.

    The last token of a completion is predicted but predicts nothing, so it is not run.
    """
    prompts = [shapes[part.group].prompt_tokens for part in microbatch for _ in part.members]
    run = [shapes[p.group].completion_tokens[m] - 1 for p in microbatch for m in p.members]
    match layout:
        case "padded":
            return len(run) * (max(prompts) + max(run)) if run else 0
        case "packed":
            return sum(prompts) + sum(run)
        case "shared_prefix":
            return sum(shapes[part.group].prompt_tokens for part in microbatch) + sum(run)


def check_groups(groups: Sequence[RolloutGroup]) -> None:
    """Refuse groups that have no well-defined loss.

    Raises:
        GroupError: a group is not whole, comes twice, or has another ``num_generations`` than the
            first; a prompt or completion has no tokens; generator log-probs are missing, not
            finite or above 0. Names the group's uid and the member.
    """
    for uid, count in Counter(g.uid for g in groups).items():
        if count > 1:
            raise GroupError(f"group {uid} comes {count} times in one batch: train on it once")
    for group in groups:
        sampled, num_generations = group.sampled, groups[0].sampled.num_generations
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


def _spread(shapes: Sequence[GroupShape], num_ranks: int, layout: Layout) -> list[list[Slice]]:
    """Slices of each rank: whole groups, or cut ones where that pays."""
    whole = [Slice(group=g, members=shape.members) for g, shape in enumerate(shapes)]
    costs = [num_tokens([part], shapes, layout) for part in whole]
    ranks: list[list[Slice]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for group in sorted(range(len(shapes)), key=lambda g: (-costs[g], g)):
        tokens, rank = loads[0]
        ranks[rank].append(whole[group])
        heapq.heapreplace(loads, (tokens + costs[group], rank))
    cut = _cut_evenly(shapes, num_ranks)
    busiest = max(sum(num_tokens([part], shapes, layout) for part in rank) for rank in cut)
    return ranks if max(loads)[0] <= _WORTH_CUTTING * busiest else cut


def _cut_evenly(shapes: Sequence[GroupShape], num_ranks: int) -> list[list[Slice]]:
    """All members one after another, cut into one stretch of equal length for each rank."""
    rows = [
        (group, member, shape.prompt_tokens + shape.completion_tokens[member])
        for group, shape in enumerate(shapes)
        for member in shape.members
    ]
    total, passed = sum(row[2] for row in rows), 0
    ranks: list[dict[int, list[int]]] = [{} for _ in range(num_ranks)]
    for group, member, length in rows:
        middle = passed + length / 2
        ranks[int(middle * num_ranks / total)].setdefault(group, []).append(member)
        passed += length
    return [[Slice(group=g, members=tuple(m)) for g, m in rank.items()] for rank in ranks]


def _fill(
    slices: Sequence[Slice], shapes: Sequence[GroupShape], max_tokens: int, layout: Layout
) -> list[Microbatch]:
    """Micro-batches within the budget, each slice in the first that has room for it."""
    parts = [piece for part in slices for piece in _fitting(part, shapes, max_tokens, layout)]

    def longest_first(part: Slice) -> tuple[int, int, tuple[int, ...]]:
        if layout == "padded":  # neighbours of equal length need no padding
            shape = shapes[part.group]
            longest = max(shape.completion_tokens[m] for m in part.members)
            return -(shape.prompt_tokens + longest), part.group, part.members
        return -num_tokens([part], shapes, layout), part.group, part.members

    microbatches: list[list[Slice]] = []
    loads: list[int] = []
    for part in sorted(parts, key=longest_first):
        if layout == "padded":
            # Further back there are only longer rows, which would pad this one.
            last = [*microbatches[-1], part] if microbatches else []
            fits = bool(last) and num_tokens(last, shapes, layout) <= max_tokens
            place = len(microbatches) - fits
        else:
            tokens = num_tokens([part], shapes, layout)
            room = (n for n, load in enumerate(loads) if load + tokens <= max_tokens)
            place = next(room, len(microbatches))
            loads += [0] * (place == len(loads))
            loads[place] += tokens
        if place == len(microbatches):
            microbatches.append([])
        microbatches[place].append(part)
    microbatches.sort(key=lambda m: -num_tokens(m, shapes, layout))
    return [tuple(sorted(m, key=lambda part: (part.group, part.members))) for m in microbatches]


def _fitting(
    part: Slice, shapes: Sequence[GroupShape], max_tokens: int, layout: Layout
) -> list[Slice]:
    """The slice, cut where it does not fit the budget; members of like length stay together."""
    if num_tokens([part], shapes, layout) <= max_tokens:
        return [part]
    lengths = shapes[part.group].completion_tokens
    pieces: list[tuple[int, ...]] = []
    for member in sorted(part.members, key=lambda m: (-lengths[m], m)):
        longer = (*pieces[-1], member) if pieces else ()
        if longer and _tokens_of(part.group, longer, shapes, layout) <= max_tokens:
            pieces[-1] = longer
            continue
        alone = _tokens_of(part.group, (member,), shapes, layout)
        if alone > max_tokens:
            raise GroupError(
                f"group {shapes[part.group].uid}, member {member}: {alone} tokens are above "
                f"learner.max_tokens_per_microbatch = {max_tokens}, and a sequence is never split: "
                "raise it, or lower rollout.max_completion_length"
            )
        pieces.append((member,))
    return [Slice(group=part.group, members=tuple(sorted(piece))) for piece in pieces]


def _tokens_of(
    group: int, members: tuple[int, ...], shapes: Sequence[GroupShape], layout: Layout
) -> int:
    return num_tokens([Slice(group=group, members=members)], shapes, layout)
