"""The built-in reward functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

# Linear in the text: no alternative can fail after it has consumed more than it gives back at
# once. The sign counts only where it cannot be a minus between two numbers ("8-3").
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)


def exact_match(completions: Sequence[str], *, answer: str, **_: Any) -> list[float]:
    """1.0 for a completion that equals the answer, else 0.0; surrounding white space is ignored."""
    return [float(text.strip() == answer.strip()) for text in completions]


def last_number(completions: Sequence[str], *, answer: str, **_: Any) -> list[float]:
    """1.0 for a completion whose last number equals the answer as a number, else 0.0.

    Reads signs, thousands commas and decimals: "so it is 1,234.50." matches "1234.5". Fractions,
    exponents and decimal commas are not read.

    Raises:
        ValueError: the answer is not one number.
    """
    if not _NUMBER.fullmatch(answer.strip()):
        raise ValueError(
            f"answer {answer[:80]!r} is not a number; last_number needs a numeric answer column"
        )
    expected = _to_decimal(answer.strip())
    return [float(_last_number(text) == expected) for text in completions]


def _last_number(text: str) -> Decimal | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _to_decimal(last.group())


def _to_decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))
