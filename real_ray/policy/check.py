"""Does a model compute the same over packed rows as over one sequence a row?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from real_ray.batching import Layout, Slice
from real_ray.errors import ModelError
from real_ray.policy.layout import PolicyInput, lay_out, one_sequence
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan

_TOLERANCE = {torch.bfloat16: 0.3, torch.float32: 1e-3}
"""Nats, mean over the tokens. Rounding of bfloat16 gives a tenth of this on random tokens; tokens
that see what they should not give several nats."""


@torch.no_grad()
def check_layout(
    policy: Callable[[PolicyInput, float], tuple[Tensor, Tensor]],
    *,
    layout: Layout,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare log-probs of two small groups in this layout with those of each sequence alone.

    Raises:
        ModelError: they differ: the model's attention or positions do not follow the layout.
    """
    groups = {g: _random_group(g, vocabulary) for g in range(2)}
    microbatch = tuple(
        Slice(group=g, members=tuple(range(group.sampled.num_generations)))
        for g, group in groups.items()
    )
    inputs, _ = lay_out(microbatch, groups, layout=layout, pad_token_id=0, device=device)
    together, _ = policy(inputs, 1.0)
    alone = []
    for group in groups.values():
        prompt = group.sampled.prompt.token_ids
        for completion in group.sampled.completions:
            tokens = np.concatenate([prompt, completion.token_ids])
            logprobs, _ = policy(one_sequence(tokens, layout=layout, device=device), 1.0)
            alone.append(logprobs[len(prompt) - 1 :])
    difference = float((together - torch.cat(alone)).abs().mean())
    if not difference <= _TOLERANCE[dtype]:
        fix = {
            "shared_prefix": "set learner.share_prefix: false",
            "packed": "set learner.packing: false and learner.share_prefix: false",
            "padded": "the model ignores its attention mask or positions, so use another model",
        }[layout]
        raise ModelError(
            f"log-probs of several sequences in one forward pass ({layout}) differ from those of "
            f"each sequence alone by {difference:.3g} nats on average (allowed "
            f"{_TOLERANCE[dtype]:g}): {fix}"
        )


def _random_group(seed: int, vocabulary: int) -> RolloutGroup:
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocabulary, count).astype(np.int32)

    completions = tuple(
        Completion(
            index=index,
            token_ids=tokens(length),
            generator_logprobs=np.zeros(length, dtype=np.float32),
            spans=(VersionSpan(version=0, start=0, end=length),),
            text="",
            finish_reason="stop",
        )
        for index, length in enumerate((5, 1, 3))
    )
    prompt = Prompt(uid=f"check:{seed}", text="", token_ids=tokens(4 + 3 * seed), answer="")
    sampled = SampledGroup(prompt=prompt, num_generations=3, completions=completions)
    return RolloutGroup(sampled=sampled, rewards=np.zeros(3, dtype=np.float32))
