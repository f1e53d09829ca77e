"""Hints of the form "did you mean ...?" for names that a user mistyped."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``" (did you mean `x`?)"`` for the valid name closest to ``name``, else ``""``."""
    matches = get_close_matches(name, list(valid), n=1)
    return f" (did you mean `{matches[0]}`?)" if matches else ""
