"""Fleet: all actors of a run, from their placement groups to their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.broadcaster import RayBroadcaster
from actors.cluster import Cluster
from actors.environment import engine_env, learner_env
from actors.generator import GeneratorActor
from actors.learner import LearnerActor
from actors.node import LOOPBACK, free_port
from actors.pools import RayGeneratorPool, RayLearnerGroup, RayRewardPool
from actors.protocol import EngineSpec, LearnerSpec, Probe, SyncRendezvous
from actors.replies import replies, reply
from actors.reward import RewardActor
from real_ray.config import Config
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.errors import ResourceError, RunError
from real_ray.placement import Bundle, Device, Placement
from real_ray.roles import Roles
from real_ray.types import Prompt, SampledGroup, Sampling

_STOP_SECONDS = 10.0
_PROBE_TOKENS = 32
_GIB = 2**30


class Fleet:
    """Generators, learner ranks and reward workers on a cluster.

    Example: ``roles = await fleet.start(probe=prompt)``; at the end ``await fleet.stop()``
    """

    def __init__(
        self, config: Config, placement: Placement, cluster: Cluster, device: Device
    ) -> None:
        self._config = config
        self._placement = placement
        self._cluster = cluster
        self._device = device
        self._groups: list[PlacementGroup] = []
        self.generators: list[Any] = []
        self._learners: list[Any] = []
        self._rewards: RayRewardPool | None = None

    async def start(
        self, *, probe: Prompt, checkpoint: Path | None = None, policy_version: int = 0
    ) -> Roles:
        """Start everything and connect learner and generators.

        Args:
            probe: the prompt whose greedy completion verifies each weight sync.
            checkpoint: that the learner goes on from; `prepare` it first.
            policy_version: of the checkpoint.

        Raises:
            ResourceError: the actors are not placed within `cluster.start_timeout_s`.
            CheckpointError: the checkpoint is damaged, or does not fit the config.
            RunError: an actor does not start.
        """
        config = self._config
        timeout_s = config.cluster.start_timeout_s
        learner_group = self._reserve(self._placement.learner)
        generator_groups = [self._reserve([bundle]) for bundle in self._placement.generators]
        for group in self._groups:
            await self._placed(group)
        self._learners = [
            self._actor(
                LearnerActor,
                bundle,
                learner_group,
                index,
                self._learner_spec(index),
                env=learner_env(self._device),
            )
            for index, bundle in enumerate(self._placement.learner)
        ]
        self.generators = [
            self._actor(
                GeneratorActor,
                bundle,
                group,
                0,
                self._engine_spec(index, policy_version),
                env=engine_env(self._device),
                max_concurrency=1000,  # an async actor: one coroutine a group
            )
            for index, (bundle, group) in enumerate(
                zip(self._placement.generators, generator_groups, strict=True)
            )
        ]
        self._rewards = RayRewardPool(
            self._start_reward_worker,
            num_workers=config.reward.num_workers,
            function=config.reward.function,
            timeout_s=config.reward.timeout_s,
        )
        address, port = await self._learner_address(config.learner.port)
        late = RunError(
            f"the actors were not ready within {timeout_s:g} s (cluster.start_timeout_s)"
        )
        starting = {
            **{
                f"learner-{i}": actor.start.remote(address, port, checkpoint and str(checkpoint))
                for i, actor in enumerate(self._learners)
            },
            **{f"generator-{i}": actor.start.remote() for i, actor in enumerate(self.generators)},
        }
        await replies(list(starting.values()), who=list(starting), timeout_s=timeout_s, late=late)
        learner = RayLearnerGroup(
            self._learners,
            config=config.learner,
            loss=config.loss,
            save_total_limit=config.checkpoint.save_total_limit,
        )
        await self._connect(learner)
        generators = RayGeneratorPool(self.generators, timeout_s=config.rollout.timeout_s)
        return Roles(
            generators=generators,
            rewards=self._rewards,
            learner=learner,
            broadcaster=RayBroadcaster(
                self.generators,
                learner,
                timeout_s=config.sync.timeout_s,
                probe=await self._make_probe(generators, probe) if config.sync.probe else None,
                probe_tolerance=config.sync.probe_tolerance,
            ),
        )

    async def stop(self) -> None:
        """End all actors, their engines' processes and their placement groups."""
        engines = [generator.shutdown.remote() for generator in self.generators]
        with contextlib.suppress(Exception):  # an engine that does not stop is killed below
            await asyncio.wait_for(
                asyncio.gather(*engines, return_exceptions=True), timeout=_STOP_SECONDS
            )
        workers = self._rewards.workers if self._rewards else []
        for actor in [*self.generators, *self._learners, *workers]:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)

    async def _connect(self, learner: RayLearnerGroup) -> None:
        config = self._config
        address, port = await self._learner_address(config.sync.port)
        backend = self._sync_backend
        rendezvous = SyncRendezvous(
            backend=backend,
            master_address=address,
            master_port=port,
            num_generators=len(self.generators),
            workers_per_generator=config.rollout.tensor_parallel_size,
            timeout_s=config.sync.timeout_s,
        )
        await learner.call(
            "weight-transfer set-up",
            [rank.connect.remote(rendezvous, self.generators) for rank in self._learners],
        )

    async def _make_probe(self, generators: RayGeneratorPool, prompt: Prompt) -> Probe:
        greedy = Sampling(
            n=1,
            temperature=0.0,
            max_tokens=min(_PROBE_TOKENS, self._config.rollout.max_completion_length),
        )
        ticket = await generators.generate(prompt, greedy)
        group: SampledGroup = await ticket.ref
        completion = group.completions[0].token_ids
        return Probe(
            # An engine samples at least one token even to score: leave room for it.
            token_ids=np.concatenate([prompt.token_ids, completion])[
                : self._config.max_model_length - 1
            ],
            num_prompt_tokens=len(prompt.token_ids),
        )

    async def _learner_address(self, port: int) -> tuple[str, int]:
        """Address of the first learner rank, and the port given or a free one there."""

        def where(_: Any, is_local: bool, port: int) -> tuple[str, int]:
            address = LOOPBACK if is_local else ray.util.get_node_ip_address()
            return address, port or free_port(address)

        result: tuple[str, int] = await reply(
            self._learners[0].__ray_call__.remote(where, self._cluster.is_local, port),
            who="learner-0",
            timeout_s=self._config.cluster.start_timeout_s,
            late=RunError(
                "learner-0 did not start within "
                f"{self._config.cluster.start_timeout_s:g} s (cluster.start_timeout_s)"
            ),
        )
        return result

    def _reserve(self, bundles: Sequence[Bundle]) -> PlacementGroup:
        group = placement_group([bundle.resources for bundle in bundles], strategy="PACK")
        self._groups.append(group)
        return group

    async def _placed(self, group: PlacementGroup) -> None:
        timeout_s = self._config.cluster.start_timeout_s
        await reply(
            group.ready(),
            who="placement",
            timeout_s=timeout_s,
            late=ResourceError(
                f"the cluster did not place {group.bundle_specs} within {timeout_s:g} s "
                f"(cluster.start_timeout_s); free now: {ray.available_resources()}"
            ),
        )

    def _actor(
        self,
        actor: type,
        bundle: Bundle,
        group: PlacementGroup,
        index: int,
        *arguments: Any,
        env: dict[str, str],
        max_concurrency: int | None = None,
    ) -> Any:
        options: dict[str, Any] = {"max_concurrency": max_concurrency} if max_concurrency else {}
        return (
            ray.remote(actor)
            .options(
                num_cpus=bundle.cpus,
                num_gpus=bundle.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
                runtime_env={"env_vars": {**self._cluster.env, **env}},
                **options,
            )
            .remote(*arguments)
        )

    def _start_reward_worker(self, index: int) -> Any:
        return (
            ray.remote(RewardActor)
            .options(
                num_cpus=self._placement.rewards[index].cpus,
                runtime_env={"env_vars": dict(self._cluster.env)},
            )
            .remote(self._config.reward.function)
        )

    @property
    def _sync_backend(self) -> str:
        if self._config.sync.backend == "auto":
            return "nccl" if self._device == "cuda" else "gloo"
        return self._config.sync.backend

    def _engine_spec(self, index: int, policy_version: int) -> EngineSpec:
        config, rollout, learner = self._config, self._config.rollout, self._config.learner
        cpu = self._device == "cpu"
        return EngineSpec(
            name=f"generator-{index}",
            model=config.model.name_or_path,
            trust_remote_code=config.model.trust_remote_code,
            device=self._device,
            dtype=learner.dtype if rollout.dtype == "auto" else rollout.dtype,
            seed=_engine_seed(config.run.seed, index, policy_version),
            max_model_length=config.max_model_length,
            tensor_parallel_size=rollout.tensor_parallel_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_bytes=int(rollout.cpu_kv_cache_gib * _GIB) if cpu else None,
            num_threads=rollout.num_threads,
            enforce_eager=rollout.enforce_eager,
            in_flight_updates=rollout.in_flight_updates,
            recompute_kv=rollout.recompute_kv,
            sync_backend=self._sync_backend,
            max_lora_rank=learner.lora_rank if learner.lora_sync == "adapter" else 0,
            lora_target_modules=tuple(learner.lora_target_modules),
        )

    def _learner_spec(self, rank: int) -> LearnerSpec:
        config = self._config
        return LearnerSpec(
            rank=rank,
            world_size=config.learner.num_ranks,
            model=config.model.name_or_path,
            trust_remote_code=config.model.trust_remote_code,
            device=self._device,
            seed=config.run.seed,
            num_threads=config.learner.num_threads,
            num_steps=config.num_steps * config.learner.minibatches_per_batch,
            run_directory=str(config.run.directory),
            temperature=config.rollout.temperature,
            config=config.learner,
            loss=config.loss,
            deepspeed=deepspeed_config(config.learner),
        )


def _engine_seed(*parts: int) -> int:
    """Another one for each generator, and for each version that a run goes on from."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
