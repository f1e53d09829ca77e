"""Sending a LoRA adapter, and refusing one; without Ray and without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_engine import engine_spec
from tiny_model import build_model
from transformers import AutoModelForCausalLM

from actors import adapter_sync
from actors.adapter_sync import AdapterSender
from actors.buckets import checksum
from actors.generator import GeneratorActor
from actors.protocol import AdapterUpdate
from real_ray.errors import SyncError
from real_ray.policy.lora import adapter_parameters, add_lora


class Client:
    policy_version = 4

    def load_adapter(self, update: AdapterUpdate) -> None:
        self.update = update


@pytest.mark.parametrize(("bucket_bytes", "num_gatherings"), [(2**26, 1), (1, None)])
def test_parameters_are_gathered_by_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, num_gatherings: int | None
) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_model(tmp_path), dtype=torch.float32)
    add_lora(model, rank=2, alpha=4.0, target_modules=["all-linear"], seed=0)
    parameters = adapter_parameters(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    count = 0

    @contextmanager
    def gathered(some: list[Any]) -> Iterator[None]:
        nonlocal count
        count += 1
        with torch.no_grad():
            for parameter in some:
                parameter.add_(1)  # a value that it has only meanwhile
            yield
            for parameter in some:
                parameter.sub_(1)

    monkeypatch.setattr(adapter_sync, "gathered", gathered)
    monkeypatch.setattr(adapter_sync, "BUCKET_BYTES", bucket_bytes)
    client: Any = Client()
    sender = AdapterSender(model, client=client, dtype=torch.bfloat16, is_sender=True)
    sent = sender.send_weights()
    assert count == (num_gatherings or len(parameters))
    assert sent.num_tensors == client.update.num_tensors == len(parameters)
    assert dict(sent.checksums) == {
        name: checksum(torch.ones_like(p, dtype=torch.bfloat16)) for name, p in parameters.items()
    }
    assert client.update.policy_version == 4


async def test_an_adapter_that_comes_after_the_first_completions_is_refused() -> None:
    generator = GeneratorActor(engine_spec(Path("none"), name="generator-7"))
    generator._engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={"a": 0}))
    update = AdapterUpdate(policy_version=1, num_tensors=0, files={})
    with pytest.raises(SyncError, match=r"generator-7: 1 completions are under way.*is replaced"):
        await generator.load_adapter(update)
