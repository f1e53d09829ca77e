"""Fleet: all actors of a run, from their placement groups to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import Cluster
from actors.environment import engine_env, learner_env
from actors.generator import GeneratorActor
from actors.killing import kill
from actors.learner import LearnerActor
from actors.learner_group import RayLearnerGroup
from actors.node import LOOPBACK, free_port
from actors.preflight import check_versions, placed
from actors.protocol import EngineSpec, LearnerSpec, SyncRendezvous
from actors.ray_generator import RayGenerator
from actors.replies import replies, reply
from actors.reward import RewardActor
from actors.reward_pool import RayRewardPool
from real_ray.activity import Activity
from real_ray.broadcaster import Broadcaster
from real_ray.config import Config
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.errors import ActorDiedError, ResourceError, RunError
from real_ray.healing_pool import HealingPool
from real_ray.placement import Device, Placement, generator_bundle
from real_ray.roles import Roles
from real_ray.tracking import Tracker
from real_ray.types import Prompt, SampledGroup, Sampling
from real_ray.weights import Probe

_PROBE_TOKENS = 32
_GIB = 2**30


class Fleet:
    """Generators, learner ranks and reward workers on a cluster.

    Example: ``roles = await fleet.start(probe=prompt)``; at the end ``await fleet.stop()``

    Args:
        tracker: hears what is lost and what is waited for.
        generator: class of the actors around the engines.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        cluster: Cluster,
        device: Device,
        *,
        tracker: Tracker | None = None,
        activity: Activity | None = None,
        generator: type[GeneratorActor] = GeneratorActor,
    ) -> None:
        self._config = config
        self._placement = placement
        self._cluster = cluster
        self._device = device
        self._generator_class = generator
        self._tracker = tracker or Tracker()
        self._activity = activity or Activity()
        self._has_begun = False
        self._policy_version = 0
        self._learner_group: PlacementGroup | None = None
        self._learners: list[Any] = []
        self._keeping: asyncio.Task[None] | None = None
        self._rewards: RayRewardPool | None = None
        self._probe: Probe | None = None

    async def start(
        self, *, probe: Prompt, checkpoint: Path | None = None, policy_version: int = 0
    ) -> Roles:
        """Start everything.

        Args:
            probe: the prompt whose greedy completion verifies each weight sync.
            checkpoint: that the learner goes on from; `prepare` it first.
            policy_version: of the checkpoint.

        Raises:
            ResourceError: the actors are not placed within `cluster.start_timeout_s`.
            CheckpointError: the checkpoint is damaged, or does not fit the config.
            RunError: an actor does not start.
        """
        self._policy_version = policy_version
        self.pool = HealingPool(
            self._generator,
            config=self._config.rollout,
            tracker=self._tracker,
            activity=self._activity,
        )
        self._keeping = asyncio.create_task(self.pool.run())
        self._rewards = self._start_rewards()
        async with asyncio.TaskGroup() as tasks:
            learner = tasks.create_task(self._start_learner(checkpoint, policy_version))
            tasks.create_task(self._generators_have_begun())
        if self._config.sync.probe:
            self._probe = await self._make_probe(probe)
        self._has_begun = True
        return self._roles(learner.result())

    async def restart_learner(self, *, checkpoint: Path | None, policy_version: int) -> Roles:
        """Start the learner anew; generators and reward workers stay. As `start`."""
        self._stop_learner()
        self._policy_version = policy_version
        return self._roles(await self._start_learner(checkpoint, policy_version))

    async def stop(self) -> None:
        """End all actors, their engines' processes and their placement groups."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._rewards is not None:
            self._rewards.stop()
        self._stop_learner()

    def _roles(self, learner: RayLearnerGroup) -> Roles:
        assert self._rewards is not None
        return Roles(
            generators=self.pool,
            rewards=self._rewards,
            learner=learner,
            broadcaster=Broadcaster(
                self.pool,
                learner,
                config=self._config.sync,
                probe=self._probe,
                tracker=self._tracker,
                activity=self._activity,
            ),
        )

    def _generator(self, index: int, num_starts: int) -> RayGenerator:
        bundle = generator_bundle(self._config, self._device, index)
        env = {**self._cluster.env, **engine_env(self._device)}
        return RayGenerator(
            bundle,
            self._engine_spec(bundle.actor, index, num_starts),
            config=self._config,
            env=env,
            tell=partial(self._tell_of_waiting, bundle.actor),
            checks_versions=not self._cluster.is_local,
            actor=self._generator_class,
        )

    def _tell_of_waiting(self, who: str, text: str) -> None:
        self._activity.set(who, "waits for a place on the cluster")  # for however long
        if not self._has_begun:
            self._tracker.event("waiting for resources", text)

    async def _generators_have_begun(self) -> None:
        """Wait for them; what makes that hopeless is raised."""
        timeout_s = self._config.cluster.start_timeout_s
        begun = asyncio.ensure_future(self.pool.has_begun())
        lost = asyncio.ensure_future(self.pool.watch())
        try:
            await asyncio.wait(
                {begun, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if lost.done():
                lost.result()
            if not begun.done():
                counts = ", ".join(f"{n} {what}" for what, n in self.pool.counts().items() if n)
                raise ResourceError(
                    f"the generators were not ready within {timeout_s:g} s "
                    f"(cluster.start_timeout_s): {counts}; free now: "
                    f"{_shown(ray.available_resources())}"
                )
        finally:
            begun.cancel()
            lost.cancel()

    async def _start_learner(self, checkpoint: Path | None, policy_version: int) -> RayLearnerGroup:
        config = self._config
        timeout_s = config.cluster.start_timeout_s
        self._activity.set("learner", "starting")
        bundles = self._placement.learner
        self._learner_group = placement_group([b.resources for b in bundles], strategy="PACK")
        await placed(
            self._learner_group,
            what="the learner",
            timeout_s=timeout_s,
            tell=partial(self._tell_of_waiting, "learner"),
        )
        if not self._cluster.is_local:
            nodes = placement_group_table(self._learner_group)["bundles_to_node_id"].values()
            for node in set(nodes):  # which may have joined since the run began
                await asyncio.to_thread(check_versions, timeout_s=timeout_s, only=node)
        self._learners = [
            ray.remote(LearnerActor)
            .options(
                num_cpus=bundle.cpus,
                num_gpus=bundle.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._learner_group, placement_group_bundle_index=index
                ),
                runtime_env={"env_vars": {**self._cluster.env, **learner_env(self._device)}},
            )
            .remote(self._learner_spec(index))
            for index, bundle in enumerate(bundles)
        ]
        address, port = await self._learner_address(config.learner.port)
        late = RunError(
            f"the learner was not ready within {timeout_s:g} s (cluster.start_timeout_s)"
        )
        await replies(
            [
                rank.start.remote(address, port, checkpoint and str(checkpoint))
                for rank in self._learners
            ],
            who=[bundle.actor for bundle in bundles],
            timeout_s=timeout_s,
            late=late,
        )
        self._activity.remove("learner")
        return RayLearnerGroup(
            self._learners,
            config=config.learner,
            loss=config.loss,
            sync_timeout_s=config.sync.timeout_s,
            rendezvous=self._rendezvous,
            policy_version=policy_version,
            save_total_limit=config.checkpoint.save_total_limit,
        )

    def _stop_learner(self) -> None:
        for rank in self._learners:
            kill(rank)
        self._learners = []
        if self._learner_group is not None:
            remove_placement_group(self._learner_group)
            self._learner_group = None

    def _start_rewards(self) -> RayRewardPool:
        reward = self._config.reward
        cpus = self._placement.rewards[0].cpus

        def start(_index: int) -> Any:
            return (
                ray.remote(RewardActor)
                .options(num_cpus=cpus, runtime_env={"env_vars": dict(self._cluster.env)})
                .remote(reward.function)
            )

        return RayRewardPool(
            start,
            num_workers=reward.num_workers,
            function=reward.function,
            timeout_s=reward.timeout_s,
            activity=self._activity,
            tracker=self._tracker,
            keeps_copies=not self._cluster.is_local,
        )

    async def _rendezvous(self, num_generators: int) -> SyncRendezvous:
        address, port = await self._learner_address(self._config.sync.port)
        return SyncRendezvous(
            backend=self._sync_backend,
            master_address=address,
            master_port=port,
            num_generators=num_generators,
            workers_per_generator=self._config.rollout.tensor_parallel_size,
            timeout_s=self._config.sync.timeout_s,
            bucket_bytes=self._config.sync.bucket_mib * 2**20,
        )

    async def _make_probe(self, prompt: Prompt) -> Probe:
        greedy = Sampling(
            n=1,
            temperature=0.0,
            max_tokens=min(_PROBE_TOKENS, self._config.rollout.max_completion_length),
        )
        while True:
            await self._generators_have_begun()
            # Before the first sync: the pool gives no group to a generator without weights.
            member = self.pool.members()[0]
            try:
                ticket = await member.generator.generate(prompt, greedy)
                break
            except ActorDiedError as error:
                self.pool.fail(member, error)
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

        timeout_s = self._config.cluster.start_timeout_s
        late = ActorDiedError(
            f"learner-0 did not answer within {timeout_s:g} s (cluster.start_timeout_s)"
        )
        ref = self._learners[0].__ray_call__.remote(where, self._cluster.is_local, port)
        found: tuple[str, int] = await reply(ref, who="learner-0", timeout_s=timeout_s, late=late)
        return found

    @property
    def _sync_backend(self) -> str:
        if self._config.sync.backend == "auto":
            return "nccl" if self._device == "cuda" else "gloo"
        return self._config.sync.backend

    def _engine_spec(self, name: str, index: int, num_starts: int) -> EngineSpec:
        config, rollout, learner = self._config, self._config.rollout, self._config.learner
        cpu = self._device == "cpu"
        return EngineSpec(
            name=name,
            model=config.model.name_or_path,
            trust_remote_code=config.model.trust_remote_code,
            device=self._device,
            dtype=learner.dtype if rollout.dtype == "auto" else rollout.dtype,
            seed=_engine_seed(config.run.seed, index, self._policy_version, num_starts),
            max_model_length=config.max_model_length,
            tensor_parallel_size=rollout.tensor_parallel_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_bytes=int(rollout.cpu_kv_cache_gib * _GIB) if cpu else None,
            num_threads=rollout.num_threads,
            enforce_eager=rollout.enforce_eager,
            in_flight_updates=rollout.in_flight_updates,
            recompute_kv=rollout.recompute_kv,
            sync_backend=self._sync_backend,
            engine_checksums=config.sync.engine_checksums,
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
    """Another one for each generator, each version that a run goes on from, and each start."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
