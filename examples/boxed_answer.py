r"""A reward for mathematics whose reference solutions end with ``\boxed{...}``.

From this repository's root: ``--reward.function examples.boxed_answer:boxed_answer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SAME = {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\left": "", r"\right": "", "$": ""}


def boxed_answer(completions: Sequence[str], *, answer: str, **_: Any) -> list[float]:
    r"""1.0 for a completion whose last ``\boxed{...}`` reads like that of the answer, else 0.0.

    The two are compared as text without white space: ``0.5`` is not ``\frac{1}{2}``.

    Raises:
        ValueError: the answer has no ``\boxed{...}``.
    """
    expected = _last_boxed(answer)
    if expected is None:
        raise ValueError(rf"the answer column has no \boxed{{...}}: {answer[-80:]!r}")
    return [float(_last_boxed(text) == expected) for text in completions]


def _last_boxed(text: str) -> str | None:
    _, found, rest = text.rpartition(r"\boxed{")
    depth = 1
    for end, character in enumerate(rest if found else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return _normalised(rest[:end])
    return None


def _normalised(answer: str) -> str:
    for written, same in _SAME.items():
        answer = answer.replace(written, same)
    return "".join(answer.split())
