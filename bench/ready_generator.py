"""A generator of the pool around an actor that has been started already."""

from __future__ import annotations

from typing import Any

from actors.ray_generator import RayGenerator
from real_ray.config import Config


class ReadyGenerator(RayGenerator):
    """Starts and stops nothing."""

    def __init__(self, index: int, actor: Any, config: Config) -> None:
        self.name = f"generator-{index}"
        self.actor = actor
        self._config = config

    async def start(self) -> None: ...

    async def stop(self, *, at_once: bool) -> None: ...
