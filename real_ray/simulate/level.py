"""How much of something there is, on average over time."""

from __future__ import annotations

import asyncio


class Level:
    """A number that changes over time, in the time of the running loop; 0 at first."""

    def __init__(self) -> None:
        self.value = 0
        self._clock = asyncio.get_running_loop().time
        self._began = self._since = self._clock()
        self._area = 0.0

    def change(self, by: int) -> None:
        now = self._clock()
        self._area += self.value * (now - self._since)
        self._since = now
        self.value += by

    def mean(self) -> float:
        """Over the time since the beginning."""
        self.change(0)
        seconds = self._since - self._began
        return self._area / seconds if seconds else 0.0
