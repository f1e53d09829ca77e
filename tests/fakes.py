"""In-process fakes of the driver's roles: deterministic, and each fails where it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from real_ray.checkpoint import DriverState, from_json, to_json
from real_ray.config import Config
from real_ray.errors import RewardError
from real_ray.roles import Roles
from real_ray.tracking import Tracker
from real_ray.types import (
    Prompt,
    RolloutTicket,
    SampledTicket,
    Sampling,
    SyncReport,
    TrainResult,
)


def make_config(**sections: dict[str, object]) -> Config:
    """A small valid config; sections override its own."""
    values: dict[str, dict[str, object]] = {
        "run": {"num_steps": 4},
        "model": {"name_or_path": "none"},
        "data": {"train": "arithmetic"},
        "rollout": {"num_generations": 2, "max_staleness": 1},
        "learner": {"prompts_per_step": 3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    if "every" in values.get("eval", {}):
        values["data"].setdefault("eval", "arithmetic")
    return Config.model_validate(values)


def make_prompts(count: int) -> list[Prompt]:
    ids = np.arange(3, dtype=np.int32)
    return [Prompt(uid=f"p:{i}", text=f"p {i}", token_ids=ids, answer=str(i)) for i in range(count)]


def sampled_ticket(
    uid: str, *, members: int = 2, oldest: int = 0, newest: int = 0
) -> SampledTicket:
    return SampledTicket(
        uid=uid,
        prompt_tokens=4,
        completion_tokens=(4,) * members,
        truncated=(False,) * members,
        oldest_version=oldest,
        newest_version=newest,
        seconds=0.5,
        generator="fake",
        ref=None,
    )


def rollout_ticket(uid: str, *, members: int = 2, oldest: int = 0) -> RolloutTicket:
    sampled = sampled_ticket(uid, members=members, oldest=oldest, newest=oldest)
    return RolloutTicket(
        sampled=sampled, rewards=tuple([1.0] + [0.0] * (members - 1)), seconds=0.1, ref=None
    )


async def no_delay(_: Prompt) -> None:
    await asyncio.sleep(0)


@dataclass
class World:
    """What the fakes share: the weights in the generators, and everything that happened."""

    version: int = -1  # in the generators
    log: list[str] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    checkpoints: list[DriverState] = field(default_factory=list)  # as they were written and read
    in_pipeline: int = 0
    most_in_pipeline: int = 0


@dataclass
class FakeGenerators:
    """Each token comes from the version that is loaded when it is sampled: first and last here."""

    world: World
    delay: Callable[[Prompt], asyncio.Future[None]] = no_delay  # type: ignore[assignment]
    fail: Callable[[Prompt, int], Exception | None] = lambda prompt, attempt: None
    attempts: dict[str, int] = field(default_factory=dict)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        self.world.in_pipeline += 1
        self.world.most_in_pipeline = max(self.world.most_in_pipeline, self.world.in_pipeline)
        oldest = self.world.version
        try:
            await self.delay(prompt)
        finally:
            self.world.in_pipeline -= 1
        attempt = self.attempts[prompt.uid] = self.attempts.get(prompt.uid, 0) + 1
        if error := self.fail(prompt, attempt):
            raise error
        return sampled_ticket(
            prompt.uid, members=sampling.n, oldest=oldest, newest=self.world.version
        )

    async def watch(self) -> None:
        await asyncio.Event().wait()


@dataclass
class FakeRewards:
    """Rewards 1, 0, 0, ...; 0 for all if `one_sided`; a RewardError for what `poison` names."""

    world: World
    poison: Callable[[str], bool] = lambda uid: False
    one_sided: Callable[[str], bool] = lambda uid: False

    async def score(self, group: SampledTicket) -> RolloutTicket:
        await asyncio.sleep(0)
        if self.poison(group.uid):
            raise RewardError(f"reward function f: group {group.uid}, member 0: NaN")
        first = 0.0 if self.one_sided(group.uid) else 1.0
        return RolloutTicket(
            sampled=group,
            rewards=tuple([first] + [0.0] * (group.num_members - 1)),
            seconds=0.1,
            ref=None,
        )


@dataclass
class FakeLearner:
    world: World
    version: int = 0

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        self.world.log.append(f"train {policy_version}")
        self.world.batches.append([group.uid for group in groups])
        await asyncio.sleep(0)
        self.version = policy_version
        return TrainResult(
            policy_version=policy_version, metrics={"real/two_sided": 1.0}, samples=()
        )

    async def save(self, directory: str) -> None:
        self.world.log.append(f"save {directory}")

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        assert state.policy_version == self.version
        await asyncio.sleep(0)
        self.world.log.append(f"checkpoint {state.policy_version} {directory}")
        self.world.checkpoints.append(from_json(to_json(state), place=directory))


@dataclass
class FakeBroadcaster:
    world: World
    learner: FakeLearner

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        await asyncio.sleep(0)
        assert policy_version == self.learner.version
        self.world.version = policy_version
        self.world.log.append(f"broadcast {policy_version}")
        return SyncReport(
            policy_version=policy_version,
            seconds=0.1,
            pause_seconds=0.1,
            num_generators=1,
            num_tensors=1,
            num_bytes=8,
            probe_difference=0.0,
        )

    async def bring_in(self) -> None:
        await asyncio.Event().wait()


@dataclass
class RecordingTracker(Tracker):
    steps: list[dict[str, float]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
    ledgers: list[dict[str, int]] = field(default_factory=list)

    def step(self, metrics, samples) -> None:  # type: ignore[no-untyped-def]
        self.steps.append(dict(metrics))

    def event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    def ledger(self, counts, *, policy_version: int) -> None:  # type: ignore[no-untyped-def]
        self.ledgers.append(dict(counts))

    def evaluation(self, policy_version: int, accuracy: float, num_prompts: int) -> None:
        self.evaluations.append((policy_version, accuracy, num_prompts))


def make_roles(world: World, **overrides: object) -> Roles:
    learner: FakeLearner = overrides.get("learner") or FakeLearner(world)  # type: ignore[assignment]
    roles = {
        "generators": FakeGenerators(world),
        "rewards": FakeRewards(world),
        "learner": learner,
        "broadcaster": FakeBroadcaster(world, learner),
        **overrides,
    }
    return Roles(**roles)  # type: ignore[arg-type]
