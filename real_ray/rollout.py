"""Sampling and scoring one group, each with further tries."""

from __future__ import annotations

from functools import partial

from real_ray.config import Config
from real_ray.errors import GenerationError, RewardError
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

    async def sample(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        """Sample the completions of a prompt.

        Raises:
            GenerationError: so did all `rollout.max_retries` further tries.
        """
        return await with_retries(
            partial(self._roles.generators.generate, prompt, sampling),
            on=GenerationError,
            max_retries=self._config.rollout.max_retries,
            tracker=self._tracker,
            event="generation failed",
        )

    async def score(self, group: SampledTicket) -> RolloutTicket:
        """Score a group.

        Raises:
            RewardError: so did all `reward.max_retries` further tries.
        """
        return await with_retries(
            partial(self._roles.rewards.score, group),
            on=RewardError,
            max_retries=self._config.reward.max_retries,
            tracker=self._tracker,
            event="scoring failed",
        )
