"""One real engine at a time: old keys and values under new weights, and requests that are ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import ray
import torch
from full_rank import FullRank
from local_ray import local_ray
from ready_generators import ready
from tiny_engine import WatchedGenerator, engine_spec
from tiny_model import build_model
from transformers import AutoModelForCausalLM

from real_ray.broadcaster import Broadcaster
from real_ray.healing_pool import HealingPool
from real_ray.types import Prompt, SampledGroup, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = np.random.default_rng(0).integers(4, 99, 300).astype(np.int32)  # more than a block
TEMPERATURE = 0.8
TOLERANCE = 1e-3  # of log-probs, in float32 on both sides


@dataclass(frozen=True, kw_only=True)
class Running:
    generator: Any
    pool: HealingPool
    broadcaster: Broadcaster
    recompute_kv: bool
    models: list[Path]  # version v has the weights of models[v % 2]

    async def become(self, version: int, *, in_flight_updates: bool) -> None:
        await self.generator.set_in_flight_updates.remote(in_flight_updates)
        await self.broadcaster.broadcast(policy_version=version)

    async def generate(self, uid: str, *, n: int, max_tokens: int) -> SampledGroup:
        prompt = Prompt(uid=uid, text="", token_ids=PROMPT, answer="")
        sampling = Sampling(n=n, temperature=TEMPERATURE, max_tokens=max_tokens)
        group: SampledGroup = await (await self.pool.generate(prompt, sampling)).ref
        return group

    def worst_difference(self, group: SampledGroup) -> float:
        """Largest |log-prob difference| of a sampled token from the model of its version."""
        models = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in self.models]
        worst = 0.0
        for completion in group.completions:
            ids = torch.tensor(np.concatenate([PROMPT, completion.token_ids])).long()
            for span in completion.spans:
                with torch.no_grad():
                    logits = models[span.version % 2](input_ids=ids[None]).logits[0, :-1]
                logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                expected = logprobs[len(PROMPT) - 1 :].numpy()[span.start : span.end]
                held = completion.generator_logprobs[span.start : span.end]
                worst = max(worst, float(np.abs(held - expected).max()))
        return worst


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[True, False], ids=["recompute", "keep"]
)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    models = [build_model(tmp_path_factory.mktemp("tiny"), seed=seed) for seed in (0, 1)]
    env = {
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # where the actor's class is
        "TMPDIR": str(tmp_path_factory.mktemp("scratch")),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with local_ray(env):
        actor = ray.remote(WatchedGenerator).options(num_cpus=0.5, max_concurrency=1000)
        generator = actor.remote(
            engine_spec(models[0], max_model_length=1024, recompute_kv=request.param)
        )
        try:
            await generator.start.remote()
            rank = ray.remote(FullRank).options(num_cpus=0.5).remote(list(map(str, models)))
            async with ready([generator], [rank], timeout_s=120.0) as it:
                it.admit_all()
                yield Running(
                    generator=generator,
                    pool=it.pool,
                    broadcaster=it.broadcaster,
                    recompute_kv=request.param,
                    models=models,
                )
        finally:
            await generator.shutdown.remote()


@pytest.mark.parametrize("in_flight_updates", [True, False])
async def test_a_new_request_sees_nothing_of_older_weights(
    running: Running, in_flight_updates: bool
) -> None:
    for version in (1, 2, 3):
        await running.become(version, in_flight_updates=in_flight_updates)
        group = await running.generate("a", n=2, max_tokens=20)
        assert {span.version for c in group.completions for span in c.spans} == {version}
        assert running.worst_difference(group) < TOLERANCE


async def test_running_completions_go_on_with_recomputed_or_with_kept_keys_and_values(
    running: Running,
) -> None:
    version = 10
    await running.become(version, in_flight_updates=True)
    sampling = asyncio.create_task(running.generate("b", n=4, max_tokens=100))
    while not sampling.done():
        version += 1
        await running.become(version, in_flight_updates=True)
    group = await sampling
    assert any(len(completion.spans) >= 2 for completion in group.completions)
    if running.recompute_kv:
        assert running.worst_difference(group) < TOLERANCE
    else:
        assert running.worst_difference(group) > 20 * TOLERANCE
    # Of what was kept nothing reaches a new request.
    assert running.worst_difference(await running.generate("c", n=2, max_tokens=20)) < TOLERANCE


async def test_without_updates_in_flight_a_sync_waits_for_what_runs(running: Running) -> None:
    version = 100
    await running.become(version, in_flight_updates=False)
    sampling = asyncio.create_task(running.generate("d", n=8, max_tokens=200))
    await running.generator.until_busy.remote()
    await running.become(version + 1, in_flight_updates=False)
    group = await sampling
    spans = [completion.spans for completion in group.completions]
    assert all(len(of_one) == 1 for of_one in spans)
    # What had begun; the others wait for the sync.
    assert version in {of_one[0].version for of_one in spans}
    assert running.worst_difference(group) < TOLERANCE


async def test_a_cancelled_group_leaves_nothing_in_the_engine(running: Running) -> None:
    sampling = asyncio.create_task(running.generate("e", n=16, max_tokens=700))
    await running.generator.until_busy.remote()
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    # The longest of the completions would take hundreds of steps more.
    questions = [await running.generator.is_busy.remote() for _ in range(30)]
    assert not questions[-1]
    group = await running.generate("f", n=4, max_tokens=20)
    assert len(group.completions) == 4
