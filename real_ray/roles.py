"""The roles that the driver works with, and what stands behind the pool of generators.

The driver sees only these protocols. In-process fakes, CPU actors and a cluster all implement
them, so the same driver runs on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from real_ray.checkpoint import DriverState
from real_ray.types import (
    FloatArray,
    IntArray,
    Prompt,
    RolloutTicket,
    SampledTicket,
    Sampling,
    SyncReport,
    TrainResult,
)
from real_ray.weights import HeldWeights, SentWeights


class GeneratorPool(Protocol):
    """Samples whole groups of completions."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        """Sample ``sampling.n`` completions of one prompt. A caller that is cancelled aborts them.

        Raises:
            GenerationError: this group failed; another try may succeed.
        """
        ...

    async def watch(self) -> None:
        """Wait for as long as there are enough generators.

        Raises:
            GeneratorsLostError: there are too few, for too long or for good.
        """
        ...


class RewardPool(Protocol):
    """Scores groups."""

    async def score(self, group: SampledTicket) -> RolloutTicket:
        """Give each member of the group its reward.

        Raises:
            RewardError: naming the reward function, the uid and the member.
            GroupLostError: its completions are gone; they can be sampled again.
        """
        ...


class LearnerGroup(Protocol):
    """Trains the policy on whole groups."""

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        """Train on the groups; the policy becomes ``policy_version``.

        Raises:
            GroupError: a group is not fit to be trained on.
            LearnerError: the learner cannot go on.
            LearnerLostError: it can, once it was started anew from a checkpoint.
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
            SyncError: no generator can hold the weights.
            LearnerLostError: the learner could not send them.
        """
        ...

    async def bring_in(self) -> None:
        """Without an end: bring the weights into generators that have started since, too.

        Raises:
            LearnerLostError: the learner could not send them.
        """
        ...


class Generator(Protocol):
    """One engine, from its placement to its end. Each wait has a deadline.

    All methods but `stop` raise ActorDiedError where the engine or its process is gone.
    """

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Wait for a place on the cluster, and start the engine there.

        Raises:
            UserError: bad input; another try would fail too.
            RunError: it did not start.
        """
        ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        """As `GeneratorPool.generate`."""
        ...

    async def progress(self) -> GeneratorProgress:
        """How much it has done; answered while it works, too."""
        ...

    async def pause(self) -> None:
        """Stop sampling; running completions are kept, or finished before."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def held_weights(self) -> HeldWeights:
        """What the last update has brought."""
        ...

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """Log-probs, at temperature 1, of each token of a sequence but the first: [T - 1]."""
        ...

    async def stop(self, *, at_once: bool) -> None:
        """End all of its processes and free its place. Raises nothing.

        Args:
            at_once: it does not answer any more.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorProgress:
    """What a generator has done since it started."""

    num_running: int  # completions that are not finished
    num_tokens: int  # sampled in those that are running
    num_finished: int  # requests


class WeightSender(Protocol):
    """The learner, as the broadcaster sees it."""

    def holding(self) -> AbstractAsyncContextManager[int]:
        """Keep the weights as they are; gives their version."""
        ...

    async def send_weights(
        self, receivers: Sequence[Generator], *, policy_version: int
    ) -> SentWeights:
        """Send the weights to these generators at once, which must be paused.

        Raises:
            SyncError: naming generators that failed, where that can be told.
            LearnerLostError: a rank of the learner failed.
        """
        ...

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """As `Generator.logprobs`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything that the driver directs."""

    generators: GeneratorPool
    rewards: RewardPool
    learner: LearnerGroup
    broadcaster: WeightBroadcaster
