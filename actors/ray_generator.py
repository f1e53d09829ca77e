"""RayGenerator: a `GeneratorActor` and its placement group, as the pool of generators sees them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.generator import GeneratorActor
from actors.killing import kill
from actors.preflight import check_versions, placed
from actors.protocol import EngineSpec
from actors.replies import reply
from real_ray.config import Config
from real_ray.errors import GenerationError, RunError, SyncError
from real_ray.placement import Bundle
from real_ray.roles import GeneratorProgress
from real_ray.types import FloatArray, IntArray, Prompt, SampledTicket, Sampling
from real_ray.weights import HeldWeights

_STOP_SECONDS = 10.0


class RayGenerator:
    """`Generator` in a process of its own, with an engine.

    Args:
        env: environment variables of its processes.
        tell: hears what the cluster lacks while there is no place.
        checks_versions: of the nodes, which may have joined since the run began.
        actor: class of the actor.
    """

    def __init__(
        self,
        bundle: Bundle,
        spec: EngineSpec,
        *,
        config: Config,
        env: dict[str, str],
        tell: Callable[[str], None],
        checks_versions: bool = False,
        actor: type[GeneratorActor] = GeneratorActor,
    ) -> None:
        self.name = spec.name
        self._bundle = bundle
        self._spec = spec
        self._config = config
        self._env = env
        self._tell = tell
        self._checks_versions = checks_versions
        self._class = actor
        self._group: PlacementGroup | None = None
        self._is_up = False
        self.actor: Any = None

    async def start(self) -> None:
        self._group = placement_group([self._bundle.resources], strategy="PACK")
        await placed(self._group, what=self.name, timeout_s=None, tell=self._tell)
        timeout_s = self._config.cluster.start_timeout_s
        if self._checks_versions:
            node = placement_group_table(self._group)["bundles_to_node_id"][0]
            await asyncio.to_thread(check_versions, timeout_s=timeout_s, only=node)
        self.actor = (
            ray.remote(self._class)
            .options(
                num_cpus=self._bundle.cpus,
                num_gpus=self._bundle.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=0
                ),
                runtime_env={"env_vars": self._env},
                max_concurrency=1000,  # an async actor: one coroutine a group
            )
            .remote(self._spec)
        )
        late = f"{self.name} was not ready within {timeout_s:g} s (cluster.start_timeout_s)"
        await reply(
            self.actor.start.remote(), who=self.name, timeout_s=timeout_s, late=RunError(late)
        )
        self._is_up = True

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        timeout_s = self._config.rollout.timeout_s
        late = GenerationError(
            f"group {prompt.uid}: {self.name} did not finish it within {timeout_s:g} s "
            "(rollout.timeout_s)"
        )
        ticket, group = self.actor.generate.options(num_returns=2).remote(prompt, sampling)
        try:
            meta = await reply(ticket, who=self.name, timeout_s=timeout_s, late=late)
        except BaseException:
            ray.cancel(ticket)  # or the engine would go on with what nobody waits for
            raise
        result: SampledTicket = dataclasses.replace(meta, ref=group)
        return result

    async def progress(self) -> GeneratorProgress:
        # Whoever asks waits for `rollout.stall_s`, and knows whether that is too long now.
        answer: GeneratorProgress = await self._ask(
            "progress", timeout_s=2 * self._config.rollout.stall_s, key="2 * rollout.stall_s"
        )
        return answer

    async def pause(self) -> None:
        rollout, sync = self._config.rollout, self._config.sync
        # Without updates in flight it waits for what runs.
        drains_s = 0.0 if rollout.in_flight_updates else rollout.timeout_s
        await self._ask(
            "pause",
            timeout_s=sync.timeout_s + drains_s,
            key="sync.timeout_s + rollout.timeout_s" if drains_s else "sync.timeout_s",
        )

    async def resume(self) -> None:
        await self._ask("resume")

    async def held_weights(self) -> HeldWeights:
        answer: HeldWeights = await self._ask("weights")
        return answer

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        answer: FloatArray = await self._ask("probe", token_ids)
        return answer

    async def stop(self, *, at_once: bool) -> None:
        try:
            if self._is_up and not at_once:
                with contextlib.suppress(Exception):  # what does not stop is killed
                    await asyncio.wait_for(self.actor.shutdown.remote(), _STOP_SECONDS)
        finally:
            with contextlib.suppress(RayError):  # Ray itself may be going
                if self.actor is not None:
                    kill(self.actor)
                if self._group is not None:
                    remove_placement_group(self._group)

    async def _ask(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float | None = None,
        key: str = "sync.timeout_s",
    ) -> Any:
        timeout_s = timeout_s or self._config.sync.timeout_s
        late = SyncError(
            f"{self.name} did not answer '{method}' within {timeout_s:g} s ({key})",
            (self.name,),
        )
        ref = getattr(self.actor, method).remote(*arguments)
        return await reply(ref, who=self.name, timeout_s=timeout_s, late=late)
