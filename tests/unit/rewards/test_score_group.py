from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from real_ray.errors import RewardError
from real_ray.rewards import Reward, score_group
from real_ray.types import Completion, Prompt, SampledGroup, VersionSpan


def group(*texts: str) -> SampledGroup:
    prompt = Prompt(
        uid="sums:3@0",
        text="<user>1 + 1?",
        token_ids=np.zeros(4, np.int32),
        answer="2",
        columns={"level": 5},
    )
    completions = tuple(
        Completion(
            index=i,
            token_ids=np.zeros(1, np.int32),
            generator_logprobs=np.zeros(1, np.float32),
            spans=(VersionSpan(version=0, start=0, end=1),),
            text=text,
            finish_reason="stop",
        )
        for i, text in enumerate(texts)
    )
    return SampledGroup(prompt=prompt, num_generations=len(texts), completions=completions)


def returning(value: Any) -> Reward:
    return Reward(name="mine:f", function=lambda completions, **_: value)


def scored(value: Any, texts: Sequence[str] = ("first", "second")) -> list[float]:
    return score_group(returning(value), group(*texts)).rewards.tolist()


def test_the_function_sees_the_whole_group_at_once() -> None:
    calls: list[tuple[Any, Any]] = []

    def record(completions: Sequence[str], **arguments: Any) -> list[float]:
        calls.append((list(completions), arguments))
        return [0.25, 1.0]

    sampled = group("first", "second")
    result = score_group(Reward(name="record", function=record), sampled)
    assert calls == [
        (["first", "second"], {"prompt": "<user>1 + 1?", "answer": "2", "columns": {"level": 5}})
    ]
    assert result.sampled is sampled
    assert result.rewards.tolist() == [0.25, 1.0]
    assert result.rewards.dtype == np.float32


@pytest.mark.parametrize(
    "value",
    [
        [True, False],
        (1, 0.0),
        [np.float64(1), np.int8(0)],
        [np.True_, np.array(0.0)],
        np.array([1, 0]),
        np.array([True, False]),
        torch.tensor([1.0, 0.0]),
        (float(x) for x in (1, 0)),
    ],
)
def test_numbers_of_any_kind_are_rewards(value: Any) -> None:
    assert scored(value) == [1.0, 0.0]


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_rewards_stay_with_their_completions(values: list[float]) -> None:
    assert scored(values, [str(v) for v in values]) == values


FINITE = st.one_of(st.booleans(), st.integers(-5, 5), st.floats(-1, 1))
BAD = st.sampled_from(
    [None, float("nan"), float("inf"), -float("inf"), "1", [1.0], 1j, 1e39, 10**400, np.nan,
     np.array([1.0]), np.str_("1"), {}]
)  # fmt: skip


@given(before=st.lists(FINITE, max_size=5), bad=BAD, after=st.lists(FINITE, max_size=5))
def test_a_value_that_is_no_finite_number_is_refused_by_member(
    before: list[Any], bad: Any, after: list[Any]
) -> None:
    values = [*before, bad, *after]
    texts = [f"text {i} {'x' * 200}" for i in range(len(values))]
    with pytest.raises(RewardError) as caught:
        scored(values, texts)
    message = str(caught.value)
    assert f"reward function `mine:f`, group sums:3@0, member {len(before)}: returned " in message
    assert type(bad).__name__ in message
    assert f"the completion starts 'text {len(before)} xxx" in message
    assert "x" * 81 not in message


@given(length=st.integers(0, 6).filter(lambda n: n != 2))
def test_a_wrong_number_of_rewards_is_refused(length: int) -> None:
    with pytest.raises(
        RewardError, match=rf"sums:3@0: returned {length} rewards for 2 completions"
    ):
        scored([1.0] * length)


@pytest.mark.parametrize(
    "value", [None, 1.0, "ab", b"ab", {0: 1.0, 1: 0.0}, {0.0, 1.0}, np.zeros((2, 1)), np.array(1.0)]
)
def test_what_is_no_sequence_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match=r"mine:f`, group sums:3@0: returned .* of 2 numbers"):
        scored(value)


def test_an_exception_is_reported_with_its_place() -> None:
    def divide(completions: Sequence[str], **_: Any) -> list[float]:
        return [1 / 0 for _ in completions]

    with pytest.raises(RewardError) as caught:
        score_group(Reward(name="mine:divide", function=divide), group("a", "b"))
    assert str(caught.value).startswith(
        "reward function `mine:divide`, group sums:3@0: raised ZeroDivisionError: division by zero"
    )
    assert f"{__file__}:{divide.__code__.co_firstlineno + 1}" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_of_a_generator_is_one_of_the_function() -> None:
    def lazy(completions: Sequence[str], **_: Any) -> Any:
        yield 1.0
        raise KeyError("level")

    with pytest.raises(RewardError, match="raised KeyError: 'level'"):
        score_group(Reward(name="lazy", function=lazy), group("a", "b"))


@pytest.mark.filterwarnings("error")
def test_an_async_function_is_refused_without_a_warning() -> None:
    async def later(completions: Sequence[str]) -> list[float]:
        return [1.0 for _ in completions]

    def wrapped(completions: Sequence[str], **_: Any) -> Any:
        return later(completions)

    with pytest.raises(RewardError, match=r"coroutine .*async reward functions are not supported"):
        score_group(Reward(name="later", function=wrapped), group("a", "b"))
