"""Evaluation while training goes on: greedy completions by weights that stay until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from real_ray.config import Config
from real_ray.errors import GenerationError, RewardError
from real_ray.rollout import Rollouts
from real_ray.tracking import Tracker
from real_ray.types import Prompt, Sampling


class Evaluator:
    """Accuracy on the evaluation prompts, through the generators and workers that training uses."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        rollouts: Rollouts,
        tracker: Tracker,
    ) -> None:
        self._config = config
        self._prompts = prompts[: config.eval.num_prompts]
        self._rollouts = rollouts
        self._tracker = tracker
        self._running: asyncio.Task[None] | None = None
        self._evaluated_version: int | None = None  # the last one
        self._sampling = Sampling(
            n=1,
            temperature=0.0,
            max_tokens=config.rollout.max_completion_length,
            stop=tuple(config.rollout.stop),
        )

    def is_due(self, policy_version: int) -> bool:
        """Before the first step, and after every `eval.every` steps."""
        config = self._config.eval
        if policy_version == 0:
            return config.at_start
        return config.every is not None and policy_version % config.every == 0

    def start(self, policy_version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate the weights that are in the generators; to be finished before they change.

        Nothing happens if that version has been evaluated.
        """
        if self._prompts and policy_version != self._evaluated_version:
            self._running = tasks.create_task(self._evaluate(policy_version), name="evaluation")

    async def finish(self) -> None:
        """Wait for an evaluation that runs."""
        running = self._running
        if running is not None:
            await asyncio.wait({running})
            if not running.cancelled():
                running.result()
            self._running = None

    def cancel(self) -> None:
        """Give up an evaluation that runs."""
        if self._running is not None and self._running.cancel():
            self._tracker.event("evaluation given up", "the run stops")

    async def _evaluate(self, policy_version: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._reward(prompt, policy_version)) for prompt in self._prompts
            ]
        rewards = [reward for task in running if (reward := task.result()) is not None]
        if rewards:
            positive = sum(reward > self._config.loss.positive_above for reward in rewards)
            self._tracker.evaluation(policy_version, positive / len(rewards), len(rewards))
        self._evaluated_version = policy_version

    async def _reward(self, prompt: Prompt, policy_version: int) -> float | None:
        """Reward of the greedy completion; None, and left out of the accuracy, if there is none."""
        try:
            scored = await self._rollouts.sample_and_score(prompt, self._sampling)
        except (GenerationError, RewardError) as error:
            if isinstance(error, RewardError) and self._config.reward.on_error == "stop":
                raise
            self._tracker.event("evaluation prompt left out", str(error))
            return None
        if scored.sampled.newest_version != policy_version:  # all that had this one were lost
            self._tracker.event(
                "evaluation prompt left out",
                f"{prompt.uid}: no generator has policy version {policy_version} any more",
            )
            return None
        return scored.rewards[0]
