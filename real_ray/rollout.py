"""Sampling and scoring one group, each with further tries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from real_ray.config import Config
from real_ray.errors import GenerationError, GroupLostError, RewardError
from real_ray.retries import with_retries
from real_ray.roles import Roles
from real_ray.tracking import Tracker
from real_ray.types import Prompt, RolloutTicket, SampledTicket, Sampling


class Rollouts:
    """What training and evaluation ask of generators and reward workers."""

    def __init__(self, config: Config, *, roles: Roles, tracker: Tracker) -> None:
        self._config = config
        self._roles = roles
        self._tracker = tracker

    async def sample_and_score(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        on_sampled: Callable[[str], None] = lambda uid: None,
        on_lost: Callable[[str], None] = lambda uid: None,
    ) -> RolloutTicket:
        """Make a group of completions with their rewards.

        Args:
            on_sampled: called with the uid whenever it goes to the reward workers.
            on_lost: called with the uid when its completions are gone, and sampled again.

        Raises:
            GenerationError: so did all `rollout.max_retries` further tries.
            RewardError: so did all `reward.max_retries` further tries.
        """
        for num_tries_left in reversed(range(self._config.rollout.max_retries + 1)):
            sampled = await self._sample(prompt, sampling)
            on_sampled(prompt.uid)
            try:
                return await self._score(sampled)
            except GroupLostError as error:
                self._tracker.event("generation failed", f"{error}; it is sampled again")
                on_lost(prompt.uid)
                if not num_tries_left:
                    raise
        raise AssertionError("the loop returns or raises")

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        return await with_retries(
            partial(self._roles.generators.generate, prompt, sampling),
            on=GenerationError,
            max_retries=self._config.rollout.max_retries,
            tracker=self._tracker,
            event="generation failed",
        )

    async def _score(self, group: SampledTicket) -> RolloutTicket:
        return await with_retries(
            partial(self._roles.rewards.score, group),
            on=RewardError,
            max_retries=self._config.reward.max_retries,
            tracker=self._tracker,
            event="scoring failed",
        )
