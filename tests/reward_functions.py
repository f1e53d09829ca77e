"""Reward functions for tests with real reward workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def even_length(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """1 for every text of even length: about half of what an untrained model writes."""
    return [float(len(text) % 2 == 0) for text in completions]
