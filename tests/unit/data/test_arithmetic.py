import re

from hypothesis import given, settings
from hypothesis import strategies as st

from real_ray.data.arithmetic import arithmetic_rows

SEEDS = st.integers(0, 2**31 - 1)


def pairs(rows: list[dict[str, str]]) -> set[tuple[int, int]]:
    found = [re.fullmatch(r"Compute (\d+) \+ (\d+)\. Reply .*", row["prompt"]) for row in rows]
    return {(int(match[1]), int(match[2])) for match in found if match}


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_sides_are_disjoint_as_unordered_pairs_and_together_complete(seed: int) -> None:
    train = pairs(arithmetic_rows("train", seed=seed))
    held_out = pairs(arithmetic_rows("eval", seed=seed))
    assert (len(train), len(held_out)) == (68, 32)
    assert train | held_out == {(a, b) for a in range(1, 11) for b in range(1, 11)}
    assert held_out == {(b, a) for a, b in held_out}
    assert not train & held_out


def test_rows_are_the_prompt_and_its_sum() -> None:
    rows = arithmetic_rows("train", seed=0) + arithmetic_rows("eval", seed=0)
    assert {"prompt": "Compute 8 + 9. Reply with only the number.", "answer": "17"} in rows
    for row in rows:
        a, b = re.findall(r"\d+", row["prompt"])
        assert row["answer"] == str(int(a) + int(b))


def test_the_seed_decides_the_sides_and_the_order() -> None:
    assert arithmetic_rows("train", seed=7) == arithmetic_rows("train", seed=7)
    assert pairs(arithmetic_rows("eval", seed=7)) != pairs(arithmetic_rows("eval", seed=8))


def test_a_prefix_of_the_held_out_sums_is_not_one_corner() -> None:
    first = [row["prompt"] for row in arithmetic_rows("eval", seed=0)[:8]]
    assert len({prompt.split()[1] for prompt in first}) > 3
