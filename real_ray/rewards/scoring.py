"""Scores a group, and refuses anything but one finite number per member."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any

import numpy as np

from real_ray.errors import RewardError, shown
from real_ray.rewards.base import Reward
from real_ray.types import RolloutGroup, SampledGroup


def score_group(reward: Reward, group: SampledGroup) -> RolloutGroup:
    """Call the reward function once, on all completions of the group.

    Bools and 0-d numpy or torch values count as numbers. A bad value never becomes a reward of 0.

    Raises:
        RewardError: the function raised, or did not return one finite number per member; names
            the function, the uid and, where one is to blame, the member.
    """
    prompt = group.prompt
    where = f"reward function `{reward.name}`, group {prompt.uid}"
    try:
        result: object = reward.function(
            [completion.text for completion in group.completions],
            prompt=prompt.text,
            answer=prompt.answer,
            columns=prompt.columns,
        )
        values = _as_list(result)
    except Exception as error:  # whatever a user's function raises
        raise RewardError(
            f"{where}: raised {type(error).__name__}: {error} ({_last_frame(error)})"
        ) from error
    if values is None:
        raise RewardError(
            f"{where}: returned {shown(result)} instead of a sequence of "
            f"{group.num_generations} numbers{_close_if_coroutine(result)}"
        )
    if len(values) != group.num_generations:
        raise RewardError(
            f"{where}: returned {len(values)} rewards for {group.num_generations} completions; it "
            "must return one per completion"
        )
    rewards = np.empty(group.num_generations, dtype=np.float32)
    for index, (value, completion) in enumerate(zip(values, group.completions, strict=True)):
        number = _as_float32(value)
        if not math.isfinite(number):
            raise RewardError(
                f"{where}, member {index}: returned {shown(value)}, which is not a finite "
                f"(float32) number; the completion starts {completion.text[:80]!r}"
            )
        rewards[index] = number
    return RolloutGroup(sampled=group, rewards=rewards)


def _as_list(result: object) -> list[Any] | None:
    """Return the values of anything that iterates over them in a defined order."""
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping, Set)):
        return None
    if getattr(result, "ndim", 1) != 1:
        return None
    return list(result)


def _as_float32(value: Any) -> float:
    """Return the value as a float32 can hold it, NaN if it is no number."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return math.nan
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:  # an int beyond float64
        return math.inf


def _last_frame(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _close_if_coroutine(result: object) -> str:
    if not inspect.iscoroutine(result):
        return ""
    result.close()  # else Python warns that it was never awaited
    return "; async reward functions are not supported"
