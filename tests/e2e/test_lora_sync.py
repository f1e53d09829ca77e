"""A real vLLM engine that gets LoRA adapters from a Hugging Face model, also while it samples."""

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
from adapter_rank import BASE, AdapterRank
from local_ray import local_ray
from ready_generators import Ready, ready
from tiny_engine import engine_spec
from tiny_model import build_model

from actors.generator import GeneratorActor
from actors.protocol import AdapterUpdate
from actors.sync import GeneratorClient
from real_ray.broadcaster import Broadcaster
from real_ray.errors import SyncError
from real_ray.healing_pool import HealingPool
from real_ray.types import Prompt, SampledGroup, Sampling
from real_ray.weights import Probe

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TENSORS = 2 * 7 * 2  # A and B of seven linear layers in each of two layers
SEQUENCE = np.random.default_rng(0).integers(4, 99, 80).astype(np.int32)
TOLERANCE = 1e-3  # of log-probs, in float32 on both sides
TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class Running:
    generator: Any
    pool: HealingPool
    rank: Any
    broadcaster: Broadcaster
    ready: Ready
    base: np.ndarray  # log-probs of SEQUENCE before the first adapter
    scratch: Path

    async def sync(self, version: int) -> None:
        await self.rank.become.remote(version)
        report = await self.broadcaster.broadcast(policy_version=version)
        assert report.num_tensors == NUM_TENSORS
        assert report.probe_difference < TOLERANCE

    async def difference(self, version: int) -> float:
        """Mean |log-prob difference| of the generator from the model of a version."""
        held, expected = await asyncio.gather(
            self.generator.probe.remote(SEQUENCE),
            self.rank.logprobs.remote(version, SEQUENCE, 1.0),
        )
        return float(np.abs(held - expected).mean())

    async def generate(self, uid: str, *, n: int, max_tokens: int) -> SampledGroup:
        prompt = Prompt(uid=uid, text="", token_ids=SEQUENCE[:70], answer="")
        sampling = Sampling(n=n, temperature=TEMPERATURE, max_tokens=max_tokens)
        group: SampledGroup = await (await self.pool.generate(prompt, sampling)).ref
        return group

    async def worst_difference(self, group: SampledGroup) -> float:
        """Largest |log-prob difference| of a sampled token from the model of its version."""
        worst = 0.0
        for completion in group.completions:
            sequence = np.concatenate([group.prompt.token_ids, completion.token_ids])
            for span in completion.spans:
                logprobs = await self.rank.logprobs.remote(span.version, sequence, TEMPERATURE)
                expected = logprobs[-len(completion.token_ids) :][span.start : span.end]
                held = completion.generator_logprobs[span.start : span.end]
                worst = max(worst, float(np.abs(held - expected).max()))
        return worst


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    model = build_model(tmp_path_factory.mktemp("tiny"))
    scratch = tmp_path_factory.mktemp("scratch")
    spec = engine_spec(
        model,
        max_model_length=640,
        max_lora_rank=6,  # vLLM has 8
        lora_target_modules=("all-linear",),
    )
    env = {
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # where the rank's class is
        "TMPDIR": str(scratch),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with local_ray(env):
        generator = (
            ray.remote(GeneratorActor).options(num_cpus=0.5, max_concurrency=1000).remote(spec)
        )
        try:
            await generator.start.remote()
            rank = ray.remote(AdapterRank).options(num_cpus=0.5).remote(str(model))
            probe = Probe(token_ids=SEQUENCE, num_prompt_tokens=1)
            async with ready([generator], [rank], probe=probe, probe_tolerance=0.01) as it:
                yield Running(
                    generator=generator,
                    pool=it.pool,
                    rank=rank,
                    broadcaster=it.broadcaster,
                    ready=it,
                    base=await generator.probe.remote(SEQUENCE),
                    scratch=scratch,
                )
        finally:
            await generator.shutdown.remote()


async def test_the_generator_samples_from_base_and_adapter_and_says_which_version(
    running: Running,
) -> None:
    base = await running.rank.logprobs.remote(BASE, SEQUENCE, 1.0)
    assert np.abs(running.base - base).mean() < TOLERANCE
    await running.sync(1)
    assert await running.difference(BASE) > 0.1, "the adapter changes nothing: this proves nothing"
    assert await running.difference(1) < TOLERANCE
    group = await running.generate("a", n=4, max_tokens=60)
    for completion in group.completions:
        length = len(completion.token_ids)
        assert [(s.version, s.start, s.end) for s in completion.spans] == [(1, 0, length)]
    assert await running.worst_difference(group) < TOLERANCE
    weights = await running.generator.weights.remote()
    assert (weights.policy_version, weights.num_tensors) == (1, NUM_TENSORS)
    assert not list(running.scratch.glob("real-ray-adapter-*"))


async def test_running_completions_go_on_under_the_next_adapter(running: Running) -> None:
    version = 10
    await running.sync(version)
    sampling = asyncio.create_task(running.generate("b", n=16, max_tokens=400))
    while not sampling.done():
        version += 1
        await running.sync(version)
    group = await sampling
    assert any(len(completion.spans) >= 2 for completion in group.completions)
    # Each token is of the version that its span says, with keys and values of that version.
    assert await running.worst_difference(group) < TOLERANCE


async def test_a_second_prompt_with_the_same_prefix_sees_nothing_of_the_last_adapter(
    running: Running,
) -> None:
    for version in (30, 31):
        await running.sync(version)
        group = await running.generate("c", n=2, max_tokens=20)
        assert await running.worst_difference(group) < TOLERANCE


async def test_an_adapter_that_was_not_sent_is_found_and_the_generator_replaced(
    running: Running,
) -> None:
    for version, what in (
        (41, "version 40"),
        # The right version and number of tensors, but another adapter: only the probe can tell.
        (40, "log-probs of a fixed sequence differ"),
    ):
        await running.sync(40)
        await running.rank.become.remote(41)
        await running.rank.fall_silent.remote(True)
        try:
            report = await running.broadcaster.broadcast(policy_version=version)
        finally:
            await running.rank.fall_silent.remote(False)
        assert report.num_generators == 0
        text = [text for kind, text in running.ready.tracker.events if kind == "sync repeated"][-1]
        assert text.startswith(f"weight sync of version {version}: generator-0 has other weights")
        assert what in text
        await running.pool.newcomers()  # the same actor, as its own replacement


async def test_an_adapter_that_vllm_refuses_is_an_error_and_leaves_the_last_one(
    running: Running,
) -> None:
    await running.sync(50)
    client = GeneratorClient(
        {"generator-0": running.generator}, workers_per_generator=1, timeout_s=60.0
    )
    client.policy_version = 51
    update = AdapterUpdate(policy_version=51, num_tensors=1, files={"adapter_config.json": b"{}"})
    with pytest.raises(SyncError, match=r"version 51: generator-0 could not load the adapter: "):
        await asyncio.to_thread(client.load_adapter, update)
    weights = await running.generator.weights.remote()
    assert (weights.policy_version, weights.num_tensors) == (50, NUM_TENSORS)
    assert await running.difference(50) < TOLERANCE
    assert not list(running.scratch.glob("real-ray-adapter-*"))


async def test_an_adapter_that_vllm_would_ignore_in_part_is_an_error(running: Running) -> None:
    await running.sync(60)
    client = GeneratorClient(
        {"generator-0": running.generator}, workers_per_generator=1, timeout_s=60.0
    )
    update = await running.rank.misplaced_adapter.remote()
    with pytest.raises(
        SyncError, match=r"no place for .* model\.layers\.7\.mlp\.down_proj.*merged"
    ):
        await asyncio.to_thread(client.load_adapter, update)
    await running.sync(61)


async def test_full_weights_have_the_names_of_a_checkpoint_without_adapter(
    running: Running,
) -> None:
    declared, yielded = await running.rank.weight_source.remote()
    assert declared == yielded
    assert ("model.layers.1.mlp.down_proj.weight", "torch.bfloat16", (64, 128)) in yielded
    assert not [name for name, *_ in yielded if "lora" in name or "base_layer" in name]
    assert len(yielded) == 2 * 11 + 2  # eleven parameters a layer, the embedding, the last norm
