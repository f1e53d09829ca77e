"""RayBroadcaster: brings the learner's weights into all generators, and verifies it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.pools import RayLearnerGroup
from actors.protocol import GeneratorWeights, Probe, SentWeights
from actors.replies import replies
from real_ray.errors import SyncError
from real_ray.types import FloatArray, SyncReport


class RayBroadcaster:
    """Pauses all generators, lets the learner send to all of them at once, resumes them.

    Args:
        probe: compared with the learner after each sync; None: no comparison.
    """

    def __init__(
        self,
        generators: Sequence[Any],
        learner: RayLearnerGroup,
        *,
        timeout_s: float,
        probe: Probe | None,
        probe_tolerance: float,
    ) -> None:
        self._generators = list(generators)
        self._names = [f"generator-{index}" for index in range(len(self._generators))]
        self._learner = learner
        self._timeout_s = timeout_s
        self._probe = probe
        self._probe_tolerance = probe_tolerance

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        began = time.monotonic()
        try:
            await self._ask("pause", policy_version)
            paused = time.monotonic()
            sent: list[SentWeights] = await self._learner.call(
                f"sync of version {policy_version}",
                [rank.send_weights.remote(policy_version) for rank in self._learner.ranks],
            )
        finally:
            # Whatever happened, no generator stays paused for ever.
            await asyncio.shield(self._ask("resume", policy_version))
        resumed = time.monotonic()
        await self._verify(policy_version, sent[0])
        difference = await self._compare_logprobs(policy_version)
        return SyncReport(
            policy_version=policy_version,
            seconds=time.monotonic() - began,
            pause_seconds=resumed - paused,
            num_tensors=sent[0].num_tensors,
            num_bytes=sent[0].num_bytes,
            probe_difference=difference,
        )

    async def _verify(self, policy_version: int, sent: SentWeights) -> None:
        held: list[GeneratorWeights] = await self._ask("weights", policy_version)
        expected = GeneratorWeights(policy_version=policy_version, num_tensors=sent.num_tensors)
        wrong = [
            f"{name} holds version {weights.policy_version} with {weights.num_tensors} tensors"
            for name, weights in zip(self._names, held, strict=True)
            if weights != expected
        ]
        if wrong:
            raise SyncError(
                f"weight sync of version {policy_version} ({sent.num_tensors} tensors): "
                + "; ".join(wrong)
            )

    async def _compare_logprobs(self, policy_version: int) -> float:
        """Largest mean |difference| of a generator from the learner on the probe's completion."""
        if self._probe is None:
            return 0.0
        token_ids, first = self._probe.token_ids, self._probe.num_prompt_tokens - 1
        learner, generators = await asyncio.gather(
            self._learner.call(
                "probe", [rank.probe.remote(token_ids) for rank in self._learner.ranks]
            ),
            self._ask("probe", policy_version, token_ids),
        )
        reference: FloatArray = learner[0]
        differences = [
            float(np.abs(logprobs - reference)[first:].mean()) for logprobs in generators
        ]
        wrong = [
            f"{name} by {difference:.3f}"
            for name, difference in zip(self._names, differences, strict=True)
            if not difference <= self._probe_tolerance  # NaN is wrong too
        ]
        if wrong:
            raise SyncError(
                f"after the weight sync of version {policy_version} log-probs of a fixed sequence "
                f"differ from the learner's: {', '.join(wrong)} on average, allowed "
                f"{self._probe_tolerance:g} (sync.probe_tolerance). The generator does not hold "
                "the learner's weights, or its dtype is too coarse"
            )
        return max(differences)

    async def _ask(self, method: str, policy_version: int, *arguments: Any) -> list[Any]:
        late = SyncError(
            f"weight sync of version {policy_version}: a generator did not answer '{method}' "
            f"within {self._timeout_s:g} s (sync.timeout_s)"
        )
        refs = [getattr(g, method).remote(*arguments) for g in self._generators]
        return await replies(refs, who=self._names, timeout_s=self._timeout_s, late=late)
