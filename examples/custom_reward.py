"""A reward function of your own.

From this repository's root: ``--reward.function examples.custom_reward:brevity_and_correct``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from real_ray.rewards.builtin import last_number


def brevity_and_correct(completions: Sequence[str], *, answer: str, **kwargs: Any) -> list[float]:
    """1.0 for a right answer with at most ten characters around it, 0.5 if longer, 0.0 if wrong."""
    correct = last_number(completions, answer=answer, **kwargs)
    return [
        is_correct * (1.0 if len(text.strip()) <= len(answer) + 10 else 0.5)
        for text, is_correct in zip(completions, correct, strict=True)
    ]
