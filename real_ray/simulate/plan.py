"""One simulated run: the real driver on simulated roles, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from real_ray.config import Config
from real_ray.driver import Driver
from real_ray.roles import Roles
from real_ray.simulate.generators import SimulatedGenerators
from real_ray.simulate.roles import SimulatedBroadcaster, SimulatedLearner, SimulatedRewards
from real_ray.simulate.timings import Timings
from real_ray.simulate.virtual_time import run_in_virtual_time
from real_ray.tracking import Tracker
from real_ray.types import Prompt, SampleRecord

_NUM_PROMPTS = 1000  # drawn again in each epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """How a plan went. Times are virtual seconds, shares are 0 to 1."""

    num_generators: int
    max_staleness: int
    num_steps: int
    seconds: float  # whole run, with the first sync and the evaluations
    seconds_per_step: float
    groups_per_second: float  # trained on
    completions_per_second: float
    generators_idle: float  # time with nothing to sample, mean over generators
    generators_paused: float  # time in which groups stood still for new weights
    slots_used: float  # completions that ran, of those that the generators could run
    rewards_busy: float  # time in which a reward worker scores, mean over workers
    learner_train: float  # shares of the steps' time
    learner_waits_for_groups: float
    learner_waits_for_evaluation: float
    learner_waits_for_sync: float
    staleness: Mapping[int, float]  # share of the groups by versions behind
    buffer_mean: float  # complete groups that wait at the end of a step
    buffer_max: int
    buffer_empty: float  # share of the steps that end with none
    stragglers: int
    failed_generations: int  # tries
    ledger: Mapping[str, int]

    @property
    def staleness_mean(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())


def simulate(
    config: Config, timings: Timings, *, progress: Callable[[int], None] = lambda step: None
) -> PlanResult:
    """Run ``config.num_steps`` steps in virtual time.

    Args:
        progress: is told of each step.

    Raises:
        RunError: as the driver raises it in a run like this.
    """
    return run_in_virtual_time(run_plan(config, timings, progress=progress))


async def run_plan(
    config: Config, timings: Timings, *, progress: Callable[[int], None] = lambda step: None
) -> PlanResult:
    """As `simulate`, in the time of the loop that runs it."""
    began = asyncio.get_running_loop().time()
    seeds = range(4 * config.run.seed, 4 * config.run.seed + 4)
    generators = SimulatedGenerators(config, timings, seed=seeds[0])
    learner = SimulatedLearner(config, timings, seed=seeds[1])
    rewards = SimulatedRewards(config, timings, seed=seeds[2])
    record = _Record(progress)
    driver = Driver(
        config,
        roles=Roles(
            generators=generators,
            rewards=rewards,
            learner=learner,
            broadcaster=SimulatedBroadcaster(config, timings, generators=generators, seed=seeds[3]),
        ),
        train=_prompts(_NUM_PROMPTS),
        evaluation=_prompts(config.eval.num_prompts) if config.data.eval else [],
        tracker=record,
    )
    await driver.run()
    seconds = asyncio.get_running_loop().time() - began
    use = generators.use()
    num_groups = sum(learner.staleness.values())
    return PlanResult(
        num_generators=config.rollout.num_generators,
        max_staleness=config.rollout.max_staleness,
        num_steps=record.num_steps,
        seconds=seconds,
        seconds_per_step=record.sums["time/step"] / record.num_steps,
        groups_per_second=_ratio(num_groups, seconds),
        completions_per_second=_ratio(num_groups * config.rollout.num_generations, seconds),
        generators_idle=use.idle,
        generators_paused=use.paused,
        slots_used=use.slots,
        rewards_busy=rewards.busy(),
        learner_train=record.share("time/train"),
        learner_waits_for_groups=record.share("time/wait"),
        learner_waits_for_evaluation=record.share("time/evaluate"),
        learner_waits_for_sync=record.share("time/sync"),
        staleness={n: learner.staleness[n] / num_groups for n in sorted(learner.staleness)},
        buffer_mean=record.sums["async/buffer"] / record.num_steps,
        buffer_max=record.buffer_max,
        buffer_empty=record.buffer_empty / record.num_steps,
        stragglers=record.events["straggler"],
        failed_generations=record.events["generation failed"],
        ledger=record.groups,
    )


class _Record(Tracker):
    """Sums, so that memory does not grow with the steps."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self.num_steps = 0
        self.sums: Counter[str] = Counter()
        self.buffer_max = 0
        self.buffer_empty = 0
        self.events: Counter[str] = Counter()
        self.groups: Mapping[str, int] = {}

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self.num_steps += 1
        self.sums.update(metrics)
        buffered = int(metrics["async/buffer"])
        self.buffer_max = max(self.buffer_max, buffered)
        self.buffer_empty += not buffered
        self._progress(self.num_steps)

    def event(self, kind: str, text: str) -> None:
        self.events[kind] += 1

    def ledger(self, counts: Mapping[str, int], *, policy_version: int) -> None:
        self.groups = counts

    def share(self, name: str) -> float:
        return _ratio(self.sums[name], self.sums["time/step"])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _prompts(count: int) -> list[Prompt]:
    token_ids = np.zeros(1, dtype=np.int32)
    return [
        Prompt(uid=f"simulated:{row}", text="", token_ids=token_ids, answer="")
        for row in range(count)
    ]
