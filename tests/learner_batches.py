"""Batches of groups for tests of the learner, and token budgets that cut them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from groups import make_group, shape_of

from real_ray.batching import Slice, num_tokens
from real_ray.types import RolloutGroup

MIXED = [
    make_group("a", prompt_length=9, lengths=(1, 7, 3, 12), rewards=(1, 0, 0, 1), truncated=(3,)),
    make_group("b", prompt_length=4, lengths=(5, 5, 5, 5), rewards=(1, 1, 1, 1)),
    make_group(
        "c", prompt_length=12, lengths=(14, 20, 1, 19), rewards=(0, 0, 0, 1), truncated=(1,)
    ),
    make_group("d", prompt_length=6, lengths=(8, 2, 4, 6), rewards=(1, 1, 0, 1)),
    make_group("e", prompt_length=3, lengths=(3, 3, 1, 2), rewards=(0, 0, 0, 0), truncated=(0, 1)),
]
# The long group goes to one rank, and the other has one-sided groups only.
ONE_RANK_ONE_SIDED = [
    make_group("f", prompt_length=30, lengths=(20, 4, 20, 4), rewards=(1, 0, 1, 0)),
    make_group("g", prompt_length=4, lengths=(5, 2, 5, 5), rewards=(1, 1, 1, 1)),
    make_group("h", prompt_length=4, lengths=(5, 1, 5, 5), rewards=(0, 0, 0, 0)),
]
# The first alone goes to both ranks; with the second, too, if rows are not padded.
ONE_LONG = [
    make_group("j", prompt_length=2, lengths=(30, 21, 1, 27), rewards=(1, 0, 0, 1)),
    make_group("k", prompt_length=3, lengths=(2, 9, 5, 4), rewards=(1, 0, 1, 0)),
]


def budget(groups: Sequence[RolloutGroup], share: float, layout: Any) -> int:
    """Tokens of a micro-batch: this share of the step, or what the longest sequence needs."""
    shapes = [shape_of(group) for group in groups]
    whole = [Slice(group=g, members=shape.members) for g, shape in enumerate(shapes)]
    longest = max(
        num_tokens([Slice(group=g, members=(m,))], shapes, layout)
        for g, shape in enumerate(shapes)
        for m in shape.members
    )
    return max(longest, math.ceil(share * num_tokens(whole, shapes, layout)))


def uneven(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Micro-batches as small as can be: every group is cut."""
    return {"max_tokens_per_microbatch": budget(groups, 0.0, "shared_prefix")}
