import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_ray.rewards import load_reward


def score(name: str, text: str, answer: str) -> float:
    (reward,) = load_reward(name).function([text], prompt="p", answer=answer, columns={})
    return reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [("17", "17", 1.0), (" 17\n", "17 ", 1.0), ("17.", "17", 0.0), ("", "17", 0.0)],
)
def test_exact_match_ignores_only_surrounding_space(text: str, answer: str, reward: float) -> None:
    assert score("exact_match", text, answer) == reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("17", "17"),
        ("8 + 9 = 17.", "17"),
        ("The answer is 17.\n", " 17 "),
        ("It is 1,234.", "1234"),
        ("1234567", "1,234,567"),
        ("$3.50", "3.5"),
        ("= .5", "0.50"),
        ("See No.5", "5"),
        ("-3", "-3"),
        ("it is \u22123", "-3"),
        ("+3", "3"),
        ("8-3", "3"),
        ("007", "7"),
        ("-0", "0"),
        ("1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("**17**", "17"),
    ],
)
def test_last_number_reads_numbers_as_people_write_them(text: str, answer: str) -> None:
    assert score("last_number", text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("17 or 18", "17"),
        ("no number", "17"),
        ("", "0"),
        ("3", "-3"),
        ("170", "17"),
        ("1.7", "17"),
        ("\u0661\u0667", "17"),  # digits of another script
    ],
)
def test_last_number_gives_nothing_for_another_number(text: str, answer: str) -> None:
    assert score("last_number", text, answer) == 0.0


@pytest.mark.parametrize("answer", ["seventeen", "", "17 apples", "1/2", "nan", "1e5", "x" * 9999])
def test_last_number_refuses_an_answer_that_is_not_one_number(answer: str) -> None:
    with pytest.raises(ValueError, match=r"answer '.{0,80}' is not a number; last_number needs"):
        score("last_number", "17", answer)


NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9))


@given(number=NUMBERS, before=st.text().map(lambda text: text + " "), sep=st.booleans())
def test_last_number_finds_any_number_at_the_end(number: Decimal, before: str, sep: bool) -> None:
    written = f"{number:,f}" if sep else f"{number:f}"
    assert score("last_number", f"{before}{written}.", f"{number:f}") == 1.0
    assert score("last_number", f"{before}{written}", f"{number + 1:f}") == 0.0


@given(text=st.text(alphabet="0123456789,.-+ a\n"))
def test_last_number_takes_any_text(text: str) -> None:
    assert score("last_number", text, "1") in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "7" * 1_000_000,
        "1,111" + ",111" * 250_000 + "1",
        "1," * 500_000,
        "1.1" * 300_000,
        "-" * 1_000_000,
        "1 " * 500_000,
        "," * 1_000_000,
        "." * 1_000_000,
    ],
)
def test_last_number_is_linear_in_the_text(text: str) -> None:
    start = time.process_time()
    score("last_number", text, "17")
    assert time.process_time() - start < 2.0
