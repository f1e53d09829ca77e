from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from real_ray.data import PromptCursor
from real_ray.types import Prompt

SEEDS = st.integers(0, 2**31 - 1)
SIZES = st.integers(1, 40)


def prompts(count: int) -> list[Prompt]:
    ids = np.zeros(1, np.int32)
    return [Prompt(uid=f"x:{i}", text="", token_ids=ids, answer="") for i in range(count)]


def draw(cursor: PromptCursor, count: int) -> list[str]:
    return [draw.prompt.uid for draw, _ in zip(cursor, range(count), strict=False)]


@given(count=SIZES, num_epochs=st.integers(1, 4), seed=SEEDS, shuffle=st.booleans())
def test_each_epoch_holds_each_prompt_once_and_no_uid_comes_twice(
    count: int, num_epochs: int, seed: int, shuffle: bool
) -> None:
    uids = draw(PromptCursor(prompts(count), seed=seed, shuffle=shuffle), count * num_epochs)
    for epoch in range(num_epochs):
        of_epoch = uids[epoch * count : (epoch + 1) * count]
        assert sorted(of_epoch) == sorted(f"x:{i}@{epoch}" for i in range(count))
    assert len(set(uids)) == len(uids)


@given(count=SIZES, seed=SEEDS, done=st.sets(st.integers(0, 60)), further=st.integers(1, 60))
def test_a_run_goes_on_with_exactly_the_numbers_that_are_not_done(
    count: int, seed: int, done: set[int], further: int
) -> None:
    first = PromptCursor(prompts(count), seed=seed, shuffle=True)
    numbered = {d.number: d.prompt.uid for d, _ in zip(first, range(200), strict=False)}
    assert list(numbered) == list(range(200))
    second = PromptCursor(prompts(count), seed=seed, shuffle=True, skip=done.__contains__)
    expected = [uid for number, uid in numbered.items() if number not in done]
    assert draw(second, further) == expected[:further]


@given(count=SIZES, num_epochs=st.integers(1, 3), skipped=st.integers(0, 130))
def test_it_ends_with_the_last_epoch(count: int, num_epochs: int, skipped: int) -> None:
    cursor = PromptCursor(
        prompts(count),
        seed=0,
        shuffle=True,
        num_epochs=num_epochs,
        skip=lambda number: number < skipped,
    )
    assert len(draw(cursor, 10_000)) == max(0, count * num_epochs - skipped)
    assert list(cursor) == []


def test_the_fingerprint_tells_other_prompts_and_another_order() -> None:
    def of(rows: list[Prompt], *, seed: int = 0, shuffle: bool = True) -> str:
        return PromptCursor(rows, seed=seed, shuffle=shuffle).fingerprint()

    rows = prompts(4)
    longer = [*rows[:3], replace(rows[3], token_ids=np.ones(2, np.int32))]
    answered = [*rows[:3], replace(rows[3], answer="b")]
    all_of_them = [
        of(rows),
        of(rows, seed=1),
        of(rows, shuffle=False),
        of(rows[:3]),
        of(rows[::-1]),
        of(longer),
        of(answered),
    ]
    assert len(set(all_of_them)) == len(all_of_them)
    assert of(prompts(4)) == of(rows)
    assert of(rows, shuffle=False) == of(rows, seed=1, shuffle=False), "a seed without effect"


def test_the_order_depends_on_seed_and_epoch() -> None:
    cursor = PromptCursor(prompts(50), seed=0, shuffle=True)
    first, second = ([uid.split("@")[0] for uid in draw(cursor, 50)] for _ in range(2))
    other = [uid.split("@")[0] for uid in draw(PromptCursor(prompts(50), seed=1, shuffle=True), 50)]
    assert first != second
    assert first != other


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    uids = draw(PromptCursor(prompts(3), seed=0, shuffle=False), 5)
    assert uids == ["x:0@0", "x:1@0", "x:2@0", "x:0@1", "x:1@1"]


def test_only_the_uid_of_a_drawn_prompt_differs() -> None:
    prompt = Prompt(
        uid="x:0", text="t", token_ids=np.arange(3, dtype=np.int32), answer="a", columns={"k": 1}
    )
    drawn = next(PromptCursor([prompt], seed=0, shuffle=True)).prompt
    assert drawn.uid == "x:0@0"
    assert (drawn.text, drawn.answer, drawn.columns) == ("t", "a", {"k": 1})
    assert drawn.token_ids is prompt.token_ids
