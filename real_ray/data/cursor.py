"""The order in which prompts are drawn, endlessly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from real_ray.types import IntArray, Prompt


class PromptCursor:
    """Draws every prompt once per epoch, epoch after epoch.

    The order of an epoch depends on ``(seed, epoch)`` only, so ``epoch`` and ``position`` are the
    whole state: setting both continues exactly there.

    Args:
        prompts: at least one, with distinct uids.
        seed: of the order.
        shuffle: False keeps the given order in each epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        assert prompts, "load_prompts never returns an empty list"
        self.epoch = 0
        self.position = 0  # prompts of this epoch drawn so far
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._order_of = (0, self._permutation(0))

    def draw(self) -> Prompt:
        """Return the next prompt; its uid gets the suffix ``@<epoch>`` and never comes again."""
        if self.position == len(self._prompts):
            self.epoch += 1
            self.position = 0
        if self._order_of[0] != self.epoch:
            self._order_of = (self.epoch, self._permutation(self.epoch))
        prompt: Prompt = self._prompts[self._order_of[1][self.position]]
        self.position += 1
        return replace(prompt, uid=f"{prompt.uid}@{self.epoch}")

    def _permutation(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return np.arange(len(self._prompts), dtype=np.int32)
        random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return random.permutation(len(self._prompts)).astype(np.int32)
