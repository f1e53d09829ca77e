"""The roles that the driver works with.

The driver sees only these protocols. In-process fakes, CPU actors and a cluster all implement
them, so the same driver runs on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from real_ray.checkpoint import DriverState
from real_ray.types import (
    Prompt,
    RolloutTicket,
    SampledTicket,
    Sampling,
    SyncReport,
    TrainResult,
)


class GeneratorPool(Protocol):
    """Samples whole groups of completions."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        """Sample ``sampling.n`` completions of one prompt. A caller that is cancelled aborts them.

        Raises:
            GenerationError: this group failed; another try may succeed.
            ActorDiedError: no generator is left.
        """
        ...


class RewardPool(Protocol):
    """Scores groups."""

    async def score(self, group: SampledTicket) -> RolloutTicket:
        """Give each member of the group its reward.

        Raises:
            RewardError: naming the reward function, the uid and the member.
        """
        ...


class LearnerGroup(Protocol):
    """Trains the policy on whole groups."""

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        """Train on the groups; the policy becomes ``policy_version``.

        Raises:
            GroupError: a group is not fit to be trained on.
            LearnerError: the learner cannot go on.
        """
        ...

    async def save(self, directory: str) -> None:
        """Write the policy as a Hugging Face directory."""
        ...

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        """Write all that a run needs to go on, buffered groups included, as one complete directory.

        Raises:
            LearnerError: it cannot be written.
        """
        ...


class WeightBroadcaster(Protocol):
    """Brings the learner's weights into all generators."""

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        """Send the current weights, labelled ``policy_version``, and verify that they arrived.

        Raises:
            SyncError: naming the generators that do not hold the weights.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything that the driver directs."""

    generators: GeneratorPool
    rewards: RewardPool
    learner: LearnerGroup
    broadcaster: WeightBroadcaster
