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
    return [cursor.draw().uid for _ in range(count)]


@given(count=SIZES, num_epochs=st.integers(1, 4), seed=SEEDS, shuffle=st.booleans())
def test_each_epoch_holds_each_prompt_once_and_no_uid_comes_twice(
    count: int, num_epochs: int, seed: int, shuffle: bool
) -> None:
    uids = draw(PromptCursor(prompts(count), seed=seed, shuffle=shuffle), count * num_epochs)
    for epoch in range(num_epochs):
        of_epoch = uids[epoch * count : (epoch + 1) * count]
        assert sorted(of_epoch) == sorted(f"x:{i}@{epoch}" for i in range(count))
    assert len(set(uids)) == len(uids)


@given(count=SIZES, seed=SEEDS, drawn=st.integers(0, 100), further=st.integers(1, 100))
def test_epoch_and_position_are_the_whole_state(
    count: int, seed: int, drawn: int, further: int
) -> None:
    first = PromptCursor(prompts(count), seed=seed, shuffle=True)
    draw(first, drawn)
    second = PromptCursor(prompts(count), seed=seed, shuffle=True)
    second.epoch, second.position = first.epoch, first.position
    assert draw(second, further) == draw(first, further)


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
    drawn = PromptCursor([prompt], seed=0, shuffle=True).draw()
    assert drawn.uid == "x:0@0"
    assert (drawn.text, drawn.answer, drawn.columns) == ("t", "a", {"k": 1})
    assert drawn.token_ids is prompt.token_ids
