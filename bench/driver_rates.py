"""Rates of the driver on roles that answer at once, and of bare actor calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import instant

from real_ray.config import Config
from real_ray.driver import Driver
from real_ray.roles import Roles
from real_ray.tracking import Tracker
from real_ray.types import SampleRecord, Sampling

NUM_GENERATORS = NUM_REWARD_WORKERS = 2
_NUM_PROMPTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """As many groups as a measurement takes."""

    num_groups: int
    prompts_per_step: int

    def config(self) -> Config:
        """Two batches are in the pipeline."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"num_steps": self.num_groups // self.prompts_per_step},
            "model": {"name_or_path": "none"},
            "data": {"train": "arithmetic"},
            "rollout": {"num_generators": NUM_GENERATORS, "max_staleness": 1},
            "reward": {"num_workers": NUM_REWARD_WORKERS},
            "learner": {"prompts_per_step": self.prompts_per_step},
            "checkpoint": {"save_steps": None},
        }
        return Config.model_validate(sections)


def roles_in_process(work: Work) -> Roles:
    generator = instant.Generator()
    return Roles(
        generators=instant.GeneratorPool(generator),
        rewards=instant.RewardPool(instant.RewardWorker(work.config().rollout.num_generations)),
        learner=instant.Learner(),
        broadcaster=instant.Broadcaster([generator.load]),
    )


async def driver_rate(
    work: Work, roles: Roles, *, after_step: Callable[[int], None] = lambda step: None
) -> float:
    """Groups per second through the driver, from its first prompt to its last step."""
    config = work.config()
    driver = Driver(
        config,
        roles=roles,
        train=instant.make_prompts(_NUM_PROMPTS),
        evaluation=[],
        tracker=_Steps(after_step),
    )
    began = time.perf_counter()
    await driver.run()
    seconds = time.perf_counter() - began
    return config.num_steps * work.prompts_per_step / seconds


async def bare_rate(work: Work, generators: Sequence[Any], workers: Sequence[Any]) -> float:
    """The two actor calls of a group, for as many groups at once as the driver has slots."""
    config = work.config()
    sampling = Sampling(
        n=config.rollout.num_generations,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_completion_length,
    )
    (prompt,) = instant.make_prompts(1)
    numbers = iter(range(work.num_groups))

    async def calls() -> None:
        for number in numbers:
            generator = generators[number % len(generators)]
            ticket, group = generator.generate.options(num_returns=2).remote(prompt, sampling)
            await ticket
            worker = workers[number % len(workers)]
            summary, _ = worker.score.options(num_returns=2).remote(group)
            await summary

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(config.num_slots):
            tasks.create_task(calls())
    return work.num_groups / (time.perf_counter() - began)


class _Steps(Tracker):
    def __init__(self, after_step: Callable[[int], None]) -> None:
        self._after_step = after_step

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self._after_step(int(metrics["step"]))
