"""The order in which prompts are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from real_ray.types import IntArray, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A prompt and its number in the order of the run. Its uid ends with ``@<epoch>``."""

    number: int
    prompt: Prompt


class PromptCursor:
    """Draws every prompt once per epoch, epoch after epoch.

    The order of an epoch depends on ``(seed, epoch)`` only. So the number of a draw tells its
    prompt, and a run goes on from the numbers that are done.

    Example: ``for draw in PromptCursor(prompts, seed=0, shuffle=True, num_epochs=2): ...``

    Args:
        prompts: at least one, with distinct uids.
        seed: of the order.
        shuffle: False keeps the given order in each epoch.
        num_epochs: None: endless.
        skip: tells of a number whether it is left out.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        num_epochs: int | None = None,
        skip: Callable[[int], bool] = lambda number: False,
    ) -> None:
        assert prompts, "load_prompts never returns an empty list"
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if num_epochs is None else num_epochs * len(prompts)
        self._next = 0
        self._skip = skip
        self._order_of: tuple[int, IntArray] = (-1, np.empty(0, dtype=np.int32))

    def __iter__(self) -> Iterator[Draw]:
        return self

    def __next__(self) -> Draw:
        while self._skip(self._next):
            self._next += 1
        if self._end is not None and self._next >= self._end:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        epoch, position = divmod(number, len(self._prompts))
        prompt = self._prompts[self._order(epoch)[position]]
        return Draw(number=number, prompt=replace(prompt, uid=f"{prompt.uid}@{epoch}"))

    def fingerprint(self) -> str:
        """Tells whether another run has the same prompts in the same order."""
        digest = hashlib.sha256(f"{self._seed if self._shuffle else None}".encode())
        for prompt in self._prompts:
            digest.update(f"\0{prompt.uid}\0{prompt.answer}\0".encode(errors="backslashreplace"))
            digest.update(prompt.token_ids.tobytes())
        return digest.hexdigest()[:16]

    def _order(self, epoch: int) -> IntArray:
        if self._order_of[0] != epoch:
            order = np.arange(len(self._prompts), dtype=np.int32)
            if self._shuffle:
                random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
                order = random.permutation(len(self._prompts)).astype(np.int32)
            self._order_of = (epoch, order)
        return self._order_of[1]
