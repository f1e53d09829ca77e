"""A trained checkpoint, exported on the command line, in transformers and in vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from engine_rank import EngineRank
from local_ray import local_ray
from tiny_engine import engine_spec
from tiny_model import build_model
from transformers import AutoModelForCausalLM

from actors.generator import GeneratorActor
from actors.node import LOOPBACK, free_port
from real_ray.cli import main

SEQUENCE = np.random.default_rng(0).integers(4, 90, 60).astype(np.int32)
TOLERANCE = 1e-3  # of log-probs, in float32 on both sides


def logprobs(model_directory: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    ids = torch.from_numpy(SEQUENCE.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return np.asarray(chosen.numpy())


def test_an_exported_checkpoint_is_the_same_policy_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run, exported = build_model(tmp_path / "tiny"), tmp_path / "run", tmp_path / "exported"
    env = {
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # where the rank's class is
        "TMPDIR": str(tmp_path),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with local_ray(env):
        rank = ray.remote(EngineRank).options(num_cpus=0.5).remote(0, 1, free_port(LOOPBACK))
        ray.get(rank.build.remote(model, zero_stage=3, lora=True))
        ray.get(rank.train.remote(range(1, 6)))
        ray.get(rank.save.remote(run / "checkpoints" / "step_5", 5))
        trained = ray.get(rank.logprobs.remote(SEQUENCE))
        ray.kill(rank)

        capsys.readouterr()
        assert main(["export", str(run), str(exported)]) == 0
        line = f"{exported}: 24 tensors in float32, policy version 5\n"
        assert capsys.readouterr().out == line
        np.testing.assert_allclose(logprobs(exported), trained, atol=TOLERANCE)
        moved = np.abs(logprobs(model) - trained).mean()
        assert moved > 20 * TOLERANCE, "otherwise the untrained model would pass too"

        generator = ray.remote(GeneratorActor).options(num_cpus=0.5, max_concurrency=1000)
        engine = generator.remote(engine_spec(exported))
        ray.get(engine.start.remote())
        np.testing.assert_allclose(ray.get(engine.probe.remote(SEQUENCE)), trained, atol=TOLERANCE)
        ray.get(engine.shutdown.remote())
