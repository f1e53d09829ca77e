"""One real engine: faults in a weight sync are found, named, and healed by the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import ray
import torch
from faulty_engine import FaultyGenerator
from full_rank import FullRank
from local_ray import local_ray
from tiny_engine import engine_spec
from tiny_model import build_model
from transformers import AutoModelForCausalLM

from real_ray.errors import SyncError
from real_ray.weights import HeldWeights, SentWeights, what_is_wrong

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = np.random.default_rng(0).integers(4, 99, 60).astype(np.int32)
MIDDLE = "model.layers.1.self_attn.k_proj.weight"  # its layer has got q_proj before


@dataclass(frozen=True, kw_only=True)
class Running:
    generator: Any
    rank: Any
    models: list[Path]  # version v has the weights of models[v % 2]

    async def sync(self, version: int) -> tuple[SentWeights, HeldWeights]:
        await self.generator.pause.remote()
        try:
            sent = await self.rank.send_weights.remote(version)
        finally:
            await self.generator.resume.remote()
        return sent, await self.generator.weights.remote()

    async def connect(self) -> None:
        await self.rank.connect.remote(None, {"generator-0": self.generator})

    async def difference(self, version: int) -> float:
        """Largest |log-prob difference| from the model of a version."""
        model = AutoModelForCausalLM.from_pretrained(self.models[version % 2], dtype=torch.float32)
        ids = torch.from_numpy(TOKENS).long()
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
        held = await self.generator.probe.remote(TOKENS)
        return float(np.abs(held - expected).max())

    async def assert_healed(self, version: int) -> None:
        sent, held = await self.sync(version)
        assert what_is_wrong(sent, held) == ""
        assert await self.difference(version) < 1e-3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
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
        actor = ray.remote(FaultyGenerator).options(num_cpus=0.5, max_concurrency=1000)
        generator = actor.remote(engine_spec(models[0], engine_checksums=True))
        try:
            await generator.start.remote()
            rank = ray.remote(FullRank).options(num_cpus=0.5)
            running = Running(
                generator=generator, rank=rank.remote(list(map(str, models))), models=models
            )
            await running.connect()
            yield running
        finally:
            await generator.shutdown.remote()


async def test_all_that_was_sent_is_held(running: Running) -> None:
    for version in (1, 2):
        sent, held = await running.sync(version)
        assert what_is_wrong(sent, held) == ""
        assert len(held.checksums) == held.num_tensors == sent.num_tensors
        assert await running.difference(version) < 1e-3
        assert await running.difference(version + 1) > 0.1


async def test_an_engine_makes_a_checksum_where_the_transfer_makes_none(running: Running) -> None:
    _, held = await running.sync(3)
    assert held.engine_checksum == ""
    await running.generator.fault.remote("give_no_checksums", True)
    made = []
    for version in (3, 4, 5):  # of models 1, 0, 1
        _, held = await running.sync(version)
        assert held.checksums == {}
        made.append(held.engine_checksum)
    assert made[0] == made[2] != made[1]
    assert all(made)
    await running.generator.fault.remote("give_no_checksums", False)


async def test_a_stale_output_layer(running: Running) -> None:
    """It is tied: vLLM loads nothing under its name."""
    await running.assert_healed(10)
    await running.generator.fault.remote("keep_stale_output_layer", True)
    sent, held = await running.sync(11)
    assert "the output layer lm_head does not have the weights received as" in what_is_wrong(
        sent, held
    )
    await running.generator.fault.remote("keep_stale_output_layer", False)
    await running.assert_healed(13)


async def test_an_update_that_breaks_off_inside_of_a_layer(running: Running) -> None:
    await running.assert_healed(20)
    await running.generator.fault.remote("break_next_transfer", MIDDLE)
    with pytest.raises(SyncError, match=r"generator-0 could not receive .* broken on purpose"):
        await running.sync(21)
    held = await running.generator.weights.remote()
    assert held.policy_version == 20
    assert "an update broke off" in held.problems[0]
    await running.difference(20)  # the engine runs, on whatever it has
    with pytest.raises(SyncError, match="there is no weight-transfer group"):
        await running.sync(21)
    await running.connect()
    await running.assert_healed(23)


async def test_an_update_that_nobody_ended(running: Running) -> None:
    """The sender has died between two calls: layers have neither old nor new weights."""
    await running.generator.pause.remote()
    await running.generator.start_weight_update.remote()
    await running.generator.resume.remote()
    assert await running.difference(23) < 1e-3
    await running.generator.start_weight_update.remote()
    await running.connect()
    await running.assert_healed(24)


@pytest.mark.parametrize("name", ["model.norm.weight", MIDDLE])
async def test_a_missing_tensor_is_named(running: Running, name: str) -> None:
    shape = (64,) if "norm" in name else (64, 64)
    await running.rank.change.remote(name, None)
    await running.connect()
    sent, held = await running.sync(31)
    wrong = what_is_wrong(sent, held)
    assert ("not loaded: model.norm.weight" if "norm" in name else "layers.1.self_attn") in wrong
    await running.rank.change.remote(name, shape)
    await running.connect()
    await running.assert_healed(33)


async def test_a_tensor_of_another_shape_is_named(running: Running) -> None:
    await running.rank.change.remote(MIDDLE, (32, 64))
    await running.connect()
    with pytest.raises(SyncError, match=rf"generator-0 could not .*{MIDDLE} \(32, 64\)"):
        await running.sync(41)
    await running.rank.change.remote(MIDDLE, (64, 64))
    await running.connect()
    await running.assert_healed(43)
