"""Real vLLM engines, real DeepSpeed ranks and real weight syncs, on a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tiny_model import build_model

from actors.cluster import connect
from actors.fleet import Fleet
from real_ray.checkpoint import DriverState
from real_ray.config import Config
from real_ray.data import load_prompts, load_tokenizer
from real_ray.driver import Driver
from real_ray.placement import plan_placement
from real_ray.roles import Roles
from real_ray.tracking import Tracker
from real_ray.types import (
    Prompt,
    RolloutTicket,
    SampledGroup,
    SampledTicket,
    SampleRecord,
    Sampling,
    SyncReport,
    TrainResult,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = Sampling(n=4, temperature=0.6, max_tokens=160)


def make_config(model: Path, **rollout: object) -> Config:
    return Config.model_validate(
        {
            "run": {"num_steps": 5},
            "model": {"name_or_path": str(model)},
            "data": {"train": "arithmetic", "max_prompt_length": 100},
            "rollout": {
                "num_generations": 4,
                "max_completion_length": 160,
                "num_generators": 2,
                "cpus_per_generator": 0.5,
                "cpu_kv_cache_gib": 0.25,
                "num_threads": 1,
                **rollout,
            },
            "reward": {"function": "reward_functions:even_length"},
            "learner": {
                "num_ranks": 2,
                "cpus_per_rank": 0.25,
                "num_threads": 1,
                "prompts_per_step": 3,
                "learning_rate": 2e-3,
            },
            "cluster": {"address": "local", "device": "cpu", "num_cpus": 2},
        }
    )


@dataclass(frozen=True, kw_only=True)
class Running:
    config: Config
    fleet: Fleet
    roles: Roles
    prompts: list[Prompt]

    async def probe_differences(self, token_ids: np.ndarray) -> list[float]:
        """Mean |log-prob difference| of each generator from the learner."""
        learner, *generators = await asyncio.gather(
            self.roles.learner.call(  # type: ignore[attr-defined]
                "probe", [rank.probe.remote(token_ids) for rank in self.ranks]
            ),
            *(generator.probe.remote(token_ids) for generator in self.generators),
        )
        return [float(np.abs(logprobs - learner[0]).mean()) for logprobs in generators]

    @property
    def generators(self) -> list[Any]:
        return [member.generator.actor for member in self.fleet.pool.members()]  # type: ignore[attr-defined]

    @property
    def ranks(self) -> list[Any]:
        return self.roles.learner.ranks  # type: ignore[attr-defined,no-any-return]

    async def scored(self, prompts: Sequence[Prompt]) -> list[RolloutTicket]:
        async def one(prompt: Prompt) -> RolloutTicket:
            return await self.roles.rewards.score(
                await self.roles.generators.generate(prompt, SAMPLING)
            )

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    config = make_config(build_model(tmp_path_factory.mktemp("tiny")))
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer, split="train", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the reward workers
        with connect(config.cluster, logs=None) as cluster:
            fleet = Fleet(config, plan_placement(config, "cpu"), cluster, "cpu")
            try:
                roles = await fleet.start(probe=prompts[0])
                yield Running(config=config, fleet=fleet, roles=roles, prompts=prompts)
            finally:
                await fleet.stop()


async def test_groups_arrive_whole_with_a_logprob_and_a_version_for_every_token(
    running: Running,
) -> None:
    await running.roles.broadcaster.broadcast(policy_version=0)
    tickets: list[SampledTicket] = await asyncio.gather(
        *(running.roles.generators.generate(p, SAMPLING) for p in running.prompts[:12])
    )
    assert {ticket.generator for ticket in tickets} == {"generator-0", "generator-1"}
    eos = load_tokenizer(running.config.model).eos_token_id
    for ticket, prompt in zip(tickets, running.prompts, strict=False):
        group: SampledGroup = await ticket.ref
        assert group.prompt.uid == prompt.uid == ticket.uid
        assert [c.index for c in group.completions] == [0, 1, 2, 3]
        assert len({c.text for c in group.completions}) > 1, "members are sampled independently"
        for completion in group.completions:
            length = len(completion.token_ids)
            assert 1 <= length <= 160
            assert completion.generator_logprobs.shape == (length,)
            if completion.finish_reason == "length":
                assert length == 160
            else:  # at any length, 160 included, the last token says why
                assert completion.token_ids[-1] == eos
            assert [(s.version, s.start, s.end) for s in completion.spans] == [(0, 0, length)]


async def test_generator_logprobs_are_those_of_the_learner_at_the_sampling_temperature(
    running: Running,
) -> None:
    await running.roles.broadcaster.broadcast(policy_version=0)
    groups = await running.scored(running.prompts[:4])
    result = await running.roles.learner.train(groups, policy_version=1)
    # At temperature 1 the same tokens differ by 0.5 and more (raw log-probs would).
    assert result.metrics["logprobs/mismatch_mean"] < 0.01
    assert abs(result.metrics["logprobs/mismatch_max"]) < 0.1


async def test_a_sync_makes_generators_agree_with_the_learner_and_without_one_they_do_not(
    running: Running,
) -> None:
    rng = np.random.default_rng(0)
    sequence = rng.integers(4, 99, 80).astype(np.int32)
    await running.roles.broadcaster.broadcast(policy_version=0)
    assert max(await running.probe_differences(sequence)) < 0.05
    for step in range(1, 4):
        groups = await running.scored(running.prompts[3 * step : 3 * step + 3])
        await running.roles.learner.train(groups, policy_version=step)
    skipped = await running.probe_differences(sequence)
    assert min(skipped) > 0.05, "the learner moved and no sync was made"
    report = await running.roles.broadcaster.broadcast(policy_version=3)
    assert max(await running.probe_differences(sequence)) < 0.05
    assert report.policy_version == 3
    assert report.num_tensors > 20
    for generator in running.generators:
        weights = await generator.weights.remote()
        assert (weights.policy_version, weights.num_tensors) == (3, report.num_tensors)


async def test_the_tied_output_layer_is_synced_with_the_embedding(running: Running) -> None:
    def scale_embedding(actor: Any) -> None:
        import torch

        with torch.no_grad():
            actor._engine.module.model.get_input_embeddings().weight.mul_(3.0)

    sequence = np.arange(10, 70, dtype=np.int32)
    await asyncio.gather(*(rank.__ray_call__.remote(scale_embedding) for rank in running.ranks))
    assert min(await running.probe_differences(sequence)) > 0.05
    await running.roles.broadcaster.broadcast(policy_version=4)
    assert max(await running.probe_differences(sequence)) < 0.05


@dataclass
class SampleTracker(Tracker):
    samples: dict[int, list[SampleRecord]] = field(default_factory=dict)
    rows: list[Mapping[str, float]] = field(default_factory=list)

    def step(self, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        self.samples[int(metrics["step"])] = list(samples)
        self.rows.append(metrics)


class SyncsInMidGroup:
    """Roles under which a sync finds an engine in the middle of a group, if one is under way.

    A group that is admitted while the learner trains starts when it is done, and the sync waits for
    the first token of a group, however fast the learner and the generators are.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._trained = asyncio.Event()
        self._trained.set()
        self._under_way = 0

    @property
    def roles(self) -> Roles:
        return dataclasses.replace(
            self._running.roles, generators=self, learner=self, broadcaster=self
        )

    async def generate(self, prompt: Prompt, sampling: Sampling) -> SampledTicket:
        self._under_way += 1
        try:
            await self._trained.wait()
            return await self._running.roles.generators.generate(prompt, sampling)
        finally:
            self._under_way -= 1

    async def train(self, groups: Sequence[RolloutTicket], *, policy_version: int) -> TrainResult:
        self._trained.clear()
        result = await self._running.roles.learner.train(groups, policy_version=policy_version)
        self._trained.set()
        return result

    async def broadcast(self, *, policy_version: int) -> SyncReport:
        def has_begun(actor: Any) -> bool:
            unfinished = actor._engine.output_processor.request_states.values()
            return any(state.detokenizer.output_token_ids for state in unfinished)

        async def in_mid_group() -> bool:
            generators = self._running.generators
            return any(
                await asyncio.gather(*(g.__ray_call__.remote(has_begun) for g in generators))
            )

        while self._under_way and not await in_mid_group():
            pass
        return await self._running.roles.broadcaster.broadcast(policy_version=policy_version)

    async def watch(self) -> None:
        await self._running.roles.generators.watch()

    async def bring_in(self) -> None:
        await self._running.roles.broadcaster.bring_in()

    async def save(self, directory: str) -> None:
        await self._running.roles.learner.save(directory)

    async def save_checkpoint(self, directory: str, state: DriverState) -> None:
        await self._running.roles.learner.save_checkpoint(directory, state)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_no_token_is_staler_than_allowed_by_the_spans_of_the_engine(
    running: Running, max_staleness: int
) -> None:
    config = make_config(Path(running.config.model.name_or_path), max_staleness=max_staleness)
    tracker = SampleTracker()
    roles = SyncsInMidGroup(running).roles
    driver = Driver(config, roles=roles, train=running.prompts, evaluation=[], tracker=tracker)
    await asyncio.wait_for(driver.run(), timeout=240)
    assert sorted(tracker.samples) == [1, 2, 3, 4, 5]
    for step, samples in tracker.samples.items():
        assert len(samples) == 3 * 4
        for sample in samples:
            trained_version = step - 1
            assert trained_version - max_staleness <= sample.oldest_version
            assert sample.oldest_version <= sample.newest_version <= trained_version
    oldest = [s.oldest_version for s in tracker.samples[5]]
    if max_staleness == 0:
        assert set(oldest) == {4}, "synchronous to the token"
    else:
        assert min(oldest) < 4, "generation never ran ahead: this run proves nothing"
        crossed = [
            s
            for samples in tracker.samples.values()
            for s in samples
            if s.newest_version > s.oldest_version
        ]
        assert crossed, "no completion went on under new weights"


async def test_the_trained_policy_loads_as_a_hugging_face_model(
    running: Running, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    await running.roles.learner.save(str(tmp_path / "model"))
    tokenizer = load_tokenizer(
        running.config.model.model_copy(update={"name_or_path": str(tmp_path / "model")})
    )
    assert tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    sequence = np.arange(10, 70, dtype=np.int32)
    ids = torch.tensor(sequence)[None].long()
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, 1:, None])[:, 0].detach().numpy()
    held, _ = await asyncio.gather(*(rank.probe.remote(sequence) for rank in running.ranks))
    assert np.abs(held - expected).mean() < 0.05
