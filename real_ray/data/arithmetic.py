"""The built-in dataset: sums of two numbers from 1 to 10."""

from __future__ import annotations

from typing import Literal

import numpy as np

NUM_HELD_OUT = 32
_NUMBERS = range(1, 11)


def arithmetic_rows(split: Literal["train", "eval"], *, seed: int) -> list[dict[str, str]]:
    """Return the 68 sums to train on or the 32 that are held out, in an order given by the seed.

    ``a + b`` and ``b + a`` are always on the same side, so no held-out sum was trained on the
    other way round.

    Example: ``{"prompt": "Compute 8 + 9. Reply with only the number.", "answer": "17"}``
    """
    random = np.random.Generator(np.random.PCG64(seed))
    unordered = [(a, b) for a in _NUMBERS for b in _NUMBERS if a <= b]
    held_out: set[tuple[int, int]] = set()
    for i in random.permutation(len(unordered)):
        # Taking what still fits always ends at exactly 32: the number of doubles is even, so
        # when one place is left, a double is left too.
        a, b = unordered[i]
        if len(held_out | {(a, b), (b, a)}) <= NUM_HELD_OUT:
            held_out |= {(a, b), (b, a)}
    ordered = [(a, b) for a in _NUMBERS for b in _NUMBERS]
    shuffled = [ordered[i] for i in random.permutation(len(ordered))]
    return [
        {"prompt": f"Compute {a} + {b}. Reply with only the number.", "answer": str(a + b)}
        for a, b in shuffled
        if ((a, b) in held_out) == (split == "eval")
    ]
