"""Peak memory of a step, against the size of groups, the token budget and the vocabulary."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from batches import Shape
from report import Report, Row, mib
from trainers import Kind, Settings
from workers import RETURN_FREED_MEMORY, StepMemory, Worker

_GROUP_SIZES = (4, 8, 16, 32)
_GROUP_SIZE_BUDGET = 1152  # tokens of a micro-batch: all sizes fill it to nine tenths
_BUDGETS = (1024, 2048, 4096, 8192)
_VOCABULARIES = (32 * 1024, 64 * 1024, 128 * 1024, 256 * 1024)
_COMPLETION_TOKENS = (1024, 1536)  # of a step, against the vocabulary: two full tiles or more


def measure(settings: Settings, *, env: dict[str, str]) -> Iterator[Report]:
    """The learner with shared prefixes; for the vocabulary also the plain loop."""
    env = env | RETURN_FREED_MEMORY
    with Worker("shared_prefix", settings, env) as worker:
        yield _group_sizes(worker)
        yield _budgets(worker)
    yield _vocabularies(settings, env)


def _group_sizes(worker: Worker) -> Report:
    found = {}
    for size in _GROUP_SIZES:
        shape = Shape(
            num_groups=max(_GROUP_SIZES) // size,
            num_generations=size,
            prompt_tokens=32,
            completion_tokens=(64, 64),
        )
        found[size] = worker.step_memory(shape, max_tokens=_GROUP_SIZE_BUDGET)
    lowest = min(memory.peak for memory in found.values())
    return Report(
        name="memory, group size",
        title=f"Peak memory of a step of {max(_GROUP_SIZES)} completions of 64 tokens, prompts "
        f"of 32, at most {_GROUP_SIZE_BUDGET} tokens a micro-batch",
        rows=[
            {"num_generations": size, **_row(memory), "times_lowest": memory.peak / lowest}
            for size, memory in found.items()
        ],
    )


def _budgets(worker: Worker) -> Report:
    rows: list[Row] = []
    for budget in _BUDGETS:
        shape = Shape(  # groups of 1024 tokens: 128 + 8 * (113 - 1)
            num_groups=budget // 1024,
            num_generations=8,
            prompt_tokens=128,
            completion_tokens=(113, 113),
        )
        memory = worker.step_memory(shape, max_tokens=budget)
        rows.append(
            {"tokens": budget, **_row(memory), "KiB_per_token": memory.peak / 1024 / budget}
        )
    return Report(
        name="memory, tokens",
        title="Peak memory of a step, one full micro-batch of groups of 8",
        rows=rows,
    )


def _vocabularies(settings: Settings, env: dict[str, str]) -> Report:
    rows: list[Row] = []
    for vocabulary in _VOCABULARIES:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            build_llama(Path(directory), vocabulary=vocabulary, seed=settings.seed)
            small = dataclasses.replace(settings, model=directory)
            kinds: list[Kind] = ["shared_prefix", "plain"]
            workers = [stack.enter_context(Worker(kind, small, env)) for kind in kinds]
            for kind, worker in zip(kinds, workers, strict=True):
                rows.append({"trainer": kind, "vocabulary": vocabulary, **_growth(worker)})
    return Report(
        name="memory, vocabulary",
        title="Peak memory of a step by completion tokens, Llama of 2 layers of 256 hidden units",
        rows=sorted(rows, key=lambda row: str(row["trainer"]), reverse=True),
    )


def _growth(worker: Worker) -> Row:
    few, many = _COMPLETION_TOKENS
    peaks = {}
    for num_tokens in (few, many):
        length = num_tokens // 8
        shape = Shape(
            num_groups=1,
            num_generations=8,
            prompt_tokens=16,
            completion_tokens=(length, length),
        )
        peaks[num_tokens] = worker.step_memory(shape, max_tokens=2 * num_tokens).peak
    return {
        f"MiB_at_{few}_tokens": mib(peaks[few]),
        f"MiB_at_{many}_tokens": mib(peaks[many]),
        "KiB_per_token": (peaks[many] - peaks[few]) / 1024 / (many - few),
    }


def _row(memory: StepMemory) -> Row:
    return {
        "micro-batches": memory.info.num_microbatches,
        "score_passes": memory.info.num_score_passes,
        "before_MiB": mib(memory.before),
        "peak_MiB_above": mib(memory.peak),
    }


def build_llama(directory: Path, *, vocabulary: int, seed: int) -> None:
    """Save a small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
