"""Small optimiser steps in plain lists, and the gradient that a loss gives to their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from real_ray.loss import GroupTable, Members, PolicyLoss
from real_ray.partial_metrics import PartialMetrics

Place = tuple[int, int]  # row and column of a member in the `GroupTable`
Share = Callable[[Members], tuple[Tensor, PartialMetrics]]


@dataclass(frozen=True)
class Step:
    """Groups of an optimiser step. The log-ratios are policy minus old log-probs."""

    rewards: list[list[float]]
    included: list[list[bool]]
    ratios: list[list[list[float]]]  # log-ratios of the tokens of each member
    old: float = -1.25  # a number that float32 and float64 hold exactly

    def places(self) -> list[Place]:
        return [(g, n) for g, group in enumerate(self.rewards) for n in range(len(group))]

    def tokens(self) -> Iterator[tuple[int, int, int]]:
        return ((g, n, t) for g, n in self.places() for t in range(len(self.ratios[g][n])))

    def table(self) -> GroupTable:
        return GroupTable(
            rewards=torch.tensor(self.rewards),
            included=torch.tensor(self.included),
            num_tokens=torch.tensor([[len(ratios) for ratios in group] for group in self.ratios]),
        )

    def members(self, places: Sequence[Place], dtype: torch.dtype = torch.float64) -> Members:
        ratios = [self.ratios[g][n] for g, n in places]
        flat = torch.tensor([r for member in ratios for r in member], dtype=dtype)
        return Members(
            logprobs=(flat + self.old).requires_grad_(),
            old_logprobs=torch.full_like(flat, self.old),
            row=torch.tensor(
                [m for m, member in enumerate(ratios) for _ in member], dtype=torch.int64
            ),
            group=torch.tensor([g for g, _ in places], dtype=torch.int64),
            index=torch.tensor([n for _, n in places], dtype=torch.int64),
        )

    def scores(self, dtype: torch.dtype = torch.float64) -> Tensor:
        means = [[sum(ratios) / len(ratios) for ratios in group] for group in self.ratios]
        return torch.tensor(means, dtype=dtype)

    def with_ratio(self, token: tuple[int, int, int], change: float) -> Step:
        ratios = [[list(member) for member in group] for group in self.ratios]
        g, n, t = token
        ratios[g][n][t] += change
        return replace(self, ratios=ratios)


def policy_share(
    loss: PolicyLoss, step: Step, dtype: torch.dtype = torch.float64, scores: Tensor | None = None
) -> Share:
    table = step.table()
    scores = step.scores(dtype) if scores is None else scores
    return lambda members: loss.share(members, table, scores)


def gradient(
    share: Share,
    step: Step,
    parts: Sequence[Sequence[Place]],
    dtype: torch.dtype = torch.float64,
) -> tuple[list[list[list[float]]], PartialMetrics]:
    """Gradient of each token, where it is in `Step.ratios`, and the metrics of all parts."""
    result: list[list[list[float]]] = [[[] for _ in group] for group in step.ratios]
    metrics = []
    for places in parts:
        members = step.members(places, dtype)
        value, part = share(members)
        value.backward()
        assert members.logprobs.grad is not None
        for (g, n), row in zip(places, range(len(places)), strict=True):
            result[g][n] = members.logprobs.grad[members.row == row].tolist()
        metrics.append(part)
    return result, PartialMetrics.merge(metrics)


def flat(values: list[list[list[float]]]) -> list[float]:
    return [value for group in values for member in group for value in member]


@st.composite
def steps(draw: st.DrawFn, max_length: int = 4) -> Step:
    """1 to 3 groups of 2 to 5; some one-sided, some members excluded, log-ratios of any scale."""
    num_groups, size = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    scale = draw(st.sampled_from([1e-3, 0.5, 3.0]))

    def table(values: st.SearchStrategy) -> list[list]:
        row = st.lists(values, min_size=size, max_size=size)
        return draw(st.lists(row, min_size=num_groups, max_size=num_groups))

    ratio = st.floats(-1, 1, allow_subnormal=False).map(lambda r: r * scale)
    return Step(
        rewards=table(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.0])),
        included=table(st.sampled_from([True, True, True, False])),
        ratios=table(st.lists(ratio, min_size=1, max_size=max_length)),
    )


@st.composite
def split_steps(draw: st.DrawFn) -> tuple[Step, list[list[Place]]]:
    """A step, and its members in any order and in any parts, some of them empty."""
    step = draw(steps())
    parts: list[list[Place]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for place in draw(st.permutations(step.places())):
        parts[draw(st.integers(0, len(parts) - 1))].append(place)
    return step, parts
