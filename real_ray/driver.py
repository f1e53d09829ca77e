"""The asynchronous REAL step.

::

    data -> admit -> generate -> score -> GroupBuffer -> take -> train -> broadcast -> release
            needs a slot                                 the oldest            frees the slots
            _admit_groups    _roll_out (a task a group)  _train_steps

Two loops and one task a group run at once:

==================  =============================  ====================================
who                 waits for                      is woken by
==================  =============================  ====================================
``_admit_groups``   a free slot                    ``release`` after a sync, ``fail``
``_roll_out``       a generator, a reward worker   their replies (each has a deadline)
``_train_steps``    the oldest groups to be ready  ``push``, ``fail``
``_train_steps``    the learner, the broadcaster   their replies (each has a deadline)
==================  =============================  ====================================

The driver moves tickets: metadata and references. Token arrays go from actor to actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from real_ray.buffer import GroupBuffer, GroupState
from real_ray.config import Config
from real_ray.data import PromptCursor
from real_ray.errors import GenerationError, RealRayError, RewardError, RunError, first_error
from real_ray.metrics import step_metrics
from real_ray.roles import GeneratorPool, LearnerGroup, RewardPool, WeightBroadcaster
from real_ray.tracking import Tracker
from real_ray.types import Prompt, RolloutTicket, SampledTicket, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything that the driver directs."""

    generators: GeneratorPool
    rewards: RewardPool
    learner: LearnerGroup
    broadcaster: WeightBroadcaster


class Driver:
    """Directs one run from the first prompt to the last step.

    Example: ``await Driver(config, roles=roles, train=train, evaluation=[], tracker=t).run()``
    """

    def __init__(
        self,
        config: Config,
        *,
        roles: Roles,
        train: Sequence[Prompt],
        evaluation: Sequence[Prompt],
        tracker: Tracker,
    ) -> None:
        self._config = config
        self._roles = roles
        self._evaluation = evaluation[: config.eval.num_prompts]
        self._tracker = tracker
        self._cursor = PromptCursor(train, seed=config.run.seed, shuffle=config.data.shuffle)
        self._prompts_per_step = config.learner.prompts_per_step
        self._buffer = GroupBuffer(
            num_slots=config.num_slots,
            num_groups=config.run.num_steps * self._prompts_per_step,
            num_generations=config.rollout.num_generations,
            max_staleness=config.rollout.max_staleness,
        )
        self._sampling = Sampling(
            n=config.rollout.num_generations,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_completion_length,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop=tuple(config.rollout.stop),
        )
        self._policy_version = 0
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Train `run.num_steps` steps, with an evaluation before and after if asked for.

        Raises:
            RunError: the run cannot go on. All tasks of the driver have ended by then.
        """
        try:
            # Also proves, before anything is sampled, that weights reach the generators.
            await self._roles.broadcaster.broadcast(policy_version=self._policy_version)
            if self._config.eval.at_start:
                await self._evaluate()
            async with asyncio.TaskGroup() as tasks:
                admission = tasks.create_task(self._admit_groups(tasks))
                await self._train_steps()
                admission.cancel()
            if self._config.eval.at_end:
                await self._evaluate()
        except* RealRayError as errors:
            raise first_error(errors) from errors

    async def _admit_groups(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._buffer.slot()
            prompt = self._cursor.draw()
            self._buffer.admit(prompt.uid)
            self._tracker.pipeline(self._buffer.counts())
            tasks.create_task(self._roll_out(prompt), name=f"roll out {prompt.uid}")

    async def _roll_out(self, prompt: Prompt) -> None:
        try:
            sampled = await self._generate(prompt)
            self._buffer.generated(prompt.uid)
            group = await self._roles.rewards.score(sampled)
        except (GenerationError, RewardError) as error:
            if isinstance(error, RewardError) and self._config.reward.on_error == "stop":
                raise
            await self._drop(prompt.uid, error)
            return
        self._failures_in_a_row = 0
        await self._buffer.push(group)
        self._tracker.pipeline(self._buffer.counts())

    async def _generate(self, prompt: Prompt) -> SampledTicket:
        for attempt in range(self._config.rollout.max_retries + 1):
            try:
                return await self._roles.generators.generate(prompt, self._sampling)
            except GenerationError as error:
                self._tracker.event("generation failed", f"{error} (try {attempt + 1})")
                last = error
        raise last

    async def _drop(self, uid: str, error: RunError) -> None:
        """Account for a group that failed; another prompt takes its place."""
        self._tracker.event("group dropped", str(error))
        await self._buffer.fail(uid)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._config.run.max_consecutive_failures:
            raise RunError(
                f"{self._failures_in_a_row} groups in a row failed "
                f"(run.max_consecutive_failures); the last one: {error}"
            ) from error

    async def _train_steps(self) -> None:
        for step in range(1, self._config.run.num_steps + 1):
            began = time.monotonic()
            batch = await self._buffer.take(
                self._prompts_per_step, policy_version=self._policy_version
            )
            taken = time.monotonic()
            result = await self._roles.learner.train(batch, policy_version=step)
            trained = time.monotonic()
            for warning in result.warnings:
                self._tracker.event("step skipped", warning)
            sync = await self._roles.broadcaster.broadcast(policy_version=step)
            await self._buffer.release(batch)
            ended = time.monotonic()
            self._tracker.step(
                step_metrics(
                    step=step,
                    batch=batch,
                    trained_version=self._policy_version,
                    result=result,
                    sync=sync,
                    ready=self._buffer.counts()[GroupState.READY],
                    failed=self._buffer.num_failed,
                    wait_seconds=taken - began,
                    train_seconds=trained - taken,
                    step_seconds=ended - began,
                ),
                result.samples,
            )
            self._policy_version = step
            await self._save_checkpoint()

    async def _save_checkpoint(self) -> None:
        every, version = self._config.checkpoint.save_steps, self._policy_version
        if every is None or version % every:
            return
        directory = str(self._config.run.checkpoint(version))
        await self._roles.learner.save_checkpoint(directory, policy_version=version)
        self._tracker.event("checkpoint saved", directory)

    async def _evaluate(self) -> None:
        """Accuracy of greedy completions on the evaluation prompts, all at once."""
        if not self._evaluation:
            return
        greedy = Sampling(
            n=1,
            temperature=0.0,
            max_tokens=self._sampling.max_tokens,
            stop=self._sampling.stop,
        )

        async def reward(prompt: Prompt) -> float:
            sampled = await self._roles.generators.generate(prompt, greedy)
            scored: RolloutTicket = await self._roles.rewards.score(sampled)
            return scored.rewards[0]

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(reward(prompt)) for prompt in self._evaluation]
        rewards = [task.result() for task in running]
        positive = sum(r > self._config.loss.positive_above for r in rewards)
        self._tracker.evaluation(self._policy_version, positive / len(rewards), len(rewards))
