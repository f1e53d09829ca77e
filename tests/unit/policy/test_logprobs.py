"""Log-probs of padded batches against one plain forward per sequence, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from real_ray.batching import collate
from real_ray.errors import GroupError
from real_ray.loss import batch_loss, group_loss, labels
from real_ray.partial_metrics import PartialMetrics
from real_ray.policy import (
    TensorBatch,
    completion_logprobs,
    model_logprobs,
    sequence_scores,
    token_metrics,
)
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan

VOCAB = 37
PAD = 3  # also an ordinary token
TAU = 0.5
TEMPERATURE = 0.6


def make_model(family: str) -> torch.nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model: torch.nn.Module = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if family == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    return model.double()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make_model(request.param)


def make_groups() -> list[RolloutGroup]:
    """Prompts and completions of very different lengths; the last group is one-sided."""
    rng = np.random.default_rng(0)
    lengths = {"a": (7, [1, 9, 4]), "b": (2, [5, 1, 2]), "c": (1, [1, 3, 1])}
    rewards = {"a": [1, 0, 0], "b": [0, 1, 1], "c": [1, 1, 1]}
    return [
        RolloutGroup(
            sampled=SampledGroup(
                prompt=Prompt(
                    uid=uid,
                    text="",
                    token_ids=rng.integers(0, VOCAB, num_prompt).astype(np.int32),
                    answer="",
                ),
                num_generations=3,
                completions=tuple(
                    Completion(
                        index=i,
                        token_ids=rng.integers(0, VOCAB, t).astype(np.int32),
                        generator_logprobs=-rng.uniform(1, 5, t).astype(np.float32),
                        spans=(VersionSpan(version=0, start=0, end=t),),
                        text="",
                        finish_reason="stop",
                    )
                    for i, t in enumerate(num_completion)
                ),
            ),
            rewards=np.array(rewards[uid], dtype=np.float32),
        )
        for uid, (num_prompt, num_completion) in lengths.items()
    ]


GROUPS = make_groups()
BATCH = TensorBatch.of(collate(GROUPS, PAD), torch.device("cpu"))


def single_distributions(
    model: torch.nn.Module, temperature: float
) -> Iterator[tuple[Completion, Tensor]]:
    """For each completion the [T, V] log-probs of a forward of it alone, without padding."""
    for group in GROUPS:
        prompt = group.sampled.prompt.token_ids
        for completion in group.sampled.completions:
            ids = np.concatenate([prompt, completion.token_ids]).astype(np.int64)
            logits = model(input_ids=torch.from_numpy(ids).unsqueeze(0)).logits[0]
            yield (
                completion,
                torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1],
            )


def sampled(distribution: Tensor, completion: Completion) -> Tensor:
    return torch.stack([distribution[t, int(k)] for t, k in enumerate(completion.token_ids)])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_padding_changes_nothing(model: torch.nn.Module, temperature: float) -> None:
    with torch.no_grad():
        logprobs, entropy = model_logprobs(model, BATCH, temperature)
        for row, (completion, distribution) in enumerate(single_distributions(model, temperature)):
            mask = BATCH.completion_mask[row]
            torch.testing.assert_close(
                logprobs[row][mask], sampled(distribution, completion), rtol=1e-10, atol=1e-10
            )
            expected = -(distribution.exp() * distribution).sum(dim=-1)
            torch.testing.assert_close(entropy[row][mask], expected, rtol=1e-10, atol=1e-10)


def test_gradient_of_the_padded_batch_is_that_of_single_sequences(model: torch.nn.Module) -> None:
    model.zero_grad()
    logprobs, _ = model_logprobs(model, BATCH, TEMPERATURE)
    scores = BATCH.by_group(
        sequence_scores(logprobs, BATCH.generator_logprobs, BATCH.completion_mask)
    )
    loss = batch_loss(group_loss(scores, labels(BATCH.rewards, 0.0), TAU), num_groups=3)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert gradients

    model.zero_grad()
    sums = {(g.uid, y): torch.ones((), dtype=torch.float64) for g in GROUPS for y in (0.0, 1.0)}
    singles = single_distributions(model, TEMPERATURE)
    for group in GROUPS:
        for reward in group.rewards.tolist():
            completion, distribution = next(singles)
            old = torch.from_numpy(completion.generator_logprobs).double()
            score = (sampled(distribution, completion) - old).mean()
            key = (group.uid, reward)
            sums[key] = sums[key] + torch.exp((-score if reward else score) / TAU)
    expected = sum(sums[uid, y].log() for uid in ("a", "b") for y in (0.0, 1.0)) / 3
    assert isinstance(expected, Tensor)
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-11)
        assert gradient.abs().max() > 0


def test_the_model_gets_mask_positions_and_the_columns_to_keep() -> None:
    seen: dict[str, Any] = {}

    def model(**arguments: Any) -> SimpleNamespace:
        seen.update(arguments)
        rows, columns = BATCH.completion_mask.shape
        return SimpleNamespace(logits=torch.zeros(rows, columns + 1, VOCAB))

    logprobs, entropy = model_logprobs(model, BATCH, TEMPERATURE)
    assert seen == {
        "input_ids": BATCH.input_ids,
        "attention_mask": BATCH.attention_mask,
        "position_ids": BATCH.position_ids,
        "logits_to_keep": 10,
        "use_cache": False,
    }
    torch.testing.assert_close(logprobs, torch.full((9, 9), -math.log(VOCAB)))
    torch.testing.assert_close(entropy, torch.full((9, 9), math.log(VOCAB)))


def test_float32_model_agrees_with_float64() -> None:
    model = make_model("qwen3")
    with torch.no_grad():
        exact, _ = model_logprobs(model, BATCH, TEMPERATURE)
        single, entropy = model_logprobs(model.float(), BATCH, TEMPERATURE)
    assert single.dtype == entropy.dtype == torch.float32
    mask = BATCH.completion_mask
    torch.testing.assert_close(single[mask].double(), exact[mask], rtol=1e-4, atol=1e-4)


class TestCompletionLogprobs:
    def test_column_i_predicts_column_i_plus_1_and_the_last_is_dropped(self) -> None:
        logits = torch.zeros(1, 3, 4)
        logits[0, 0, 2] = math.log(5)  # predicts the first completion token
        logits[0, 1, 0] = math.log(3)
        logits[0, 2] = torch.nan
        logprobs, entropy = completion_logprobs(logits, torch.tensor([[2, 1]]), 1.0)
        assert logprobs[0].tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 6)])
        first = -(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(1 / 8))
        assert entropy[0, 0].item() == pytest.approx(first)

    def test_bfloat16_logits_are_computed_in_float32(self) -> None:
        logits = torch.randn(2, 4, 11).bfloat16().requires_grad_()
        tokens = torch.randint(0, 11, (2, 3))
        logprobs, entropy = completion_logprobs(logits, tokens, 0.7)
        assert logprobs.dtype == entropy.dtype == torch.float32
        exact, _ = completion_logprobs(logits.double(), tokens, 0.7)
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)
        assert logprobs.requires_grad
        assert not entropy.requires_grad

    # From one logit to all: tiles of one token, of several, of whole rows, and of everything.
    @pytest.mark.parametrize("tile_elements", [1, 14, 34, 80, 1000])
    def test_tiles_equal_one_log_softmax(self, tile_elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(4, 6, 7, generator=generator, dtype=torch.float64, requires_grad=True)
        tokens = torch.randint(0, 7, (4, 5), generator=generator)
        weights = torch.randn(4, 5, generator=generator, dtype=torch.float64)

        logprobs, entropy = completion_logprobs(logits, tokens, 2.0, tile_elements=tile_elements)
        (logprobs * weights).sum().backward()
        gradient, logits.grad = logits.grad, None

        distribution = torch.log_softmax(logits[:, :-1] / 2.0, dim=-1)
        expected = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        (expected * weights).sum().backward()
        torch.testing.assert_close(logprobs, expected)
        torch.testing.assert_close(gradient, logits.grad)
        torch.testing.assert_close(
            entropy, -(distribution.exp() * distribution).sum(dim=-1).detach()
        )

    def test_no_float32_copy_of_the_vocabulary_is_kept_for_backward(self) -> None:
        vocabulary = 1000
        logits = torch.randn(4, 6, vocabulary).bfloat16().requires_grad_()
        kept: list[tuple[int, ...]] = []

        def pack(saved: Tensor) -> Tensor:
            if saved.dtype == torch.float32:
                kept.append(tuple(saved.shape))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            logprobs, _ = completion_logprobs(logits, torch.zeros(4, 5, dtype=torch.int64), 1.0)
        assert all(vocabulary not in shape for shape in kept)
        logprobs.sum().backward()
        assert logits.grad is not None
        assert logits.grad.dtype == torch.bfloat16
        assert logits.grad[:, :-1].abs().sum() > 0
        assert torch.equal(logits.grad[:, -1], torch.zeros(4, vocabulary, dtype=torch.bfloat16))

    def test_a_token_that_is_ruled_out_leaves_the_entropy_finite(self) -> None:
        logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]])
        logprobs, entropy = completion_logprobs(logits, torch.tensor([[0]]), 1.0)
        assert logprobs.item() == pytest.approx(-math.log(2))
        assert entropy.item() == pytest.approx(math.log(2))

    def test_logits_of_all_columns_are_refused(self) -> None:
        with pytest.raises(GroupError, match=r"\(2, 9, 5\).*\(2, 3\).*logits_to_keep"):
            completion_logprobs(torch.zeros(2, 9, 5), torch.zeros(2, 3, dtype=torch.int64), 1.0)

    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
    def test_temperature(self, temperature: float) -> None:
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            completion_logprobs(
                torch.zeros(1, 2, 5), torch.zeros(1, 1, dtype=torch.int64), temperature
            )


class TestSequenceScores:
    def test_mean_over_the_tokens_of_the_mask(self) -> None:
        logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, math.inf, 7.0]])
        old = torch.tensor([[-1.5, -1.0, 0.0], [-4.0, 0.0, 0.0]])
        mask = torch.tensor([[True, True, False], [True, False, False]])
        assert sequence_scores(logprobs, old, mask).tolist() == [-0.25, 3.0]

    def test_gradient_flows_through_the_policy_only(self) -> None:
        logprobs = torch.zeros(1, 3, requires_grad=True)
        old = torch.zeros(1, 3, requires_grad=True)
        sequence_scores(logprobs, old, torch.tensor([[True, True, False]])).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[0.5, 0.5, 0.0]]
        assert old.grad is None

    def test_a_row_without_tokens_scores_zero(self) -> None:
        logprobs = torch.full((1, 2), -5.0, requires_grad=True)
        scores = sequence_scores(logprobs, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
        scores.sum().backward()
        assert scores.tolist() == [0.0]
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[0.0, 0.0]]

    def test_shapes_that_would_broadcast_are_refused(self) -> None:
        mask = torch.ones(2, 3, dtype=torch.bool)
        with pytest.raises(GroupError, match=r"\(2, 3\).*\(1, 3\)"):
            sequence_scores(torch.zeros(2, 3), torch.zeros(1, 3), mask)


class TestTokenMetrics:
    learner = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -1.0, math.nan]])
    generator = torch.tensor([[-1.1, -1.8, 0.0], [-0.5, -1.0, 0.0]])
    entropy = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, math.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])

    def test_values(self) -> None:
        values = token_metrics(self.learner, self.generator, self.entropy, self.mask).values()
        k3 = (math.exp(0.1) - 1 - 0.1) + (math.exp(-0.2) - 1 + 0.2)
        assert values == pytest.approx(
            {
                "logprobs/mismatch_mean": 0.1,
                "logprobs/mismatch_max": 0.2,
                "logprobs/mismatch_k3": k3 / 3,
                "policy/entropy": 2.0,
            },
            abs=1e-6,
        )

    def test_parts_merge_to_the_whole(self) -> None:
        parts = [
            token_metrics(self.learner[row], self.generator[row], self.entropy[row], self.mask[row])
            for row in (slice(0, 1), slice(1, 2))
        ]
        whole = token_metrics(self.learner, self.generator, self.entropy, self.mask)
        assert PartialMetrics.merge(parts).values() == pytest.approx(whole.values())

    def test_no_tokens_no_keys(self) -> None:
        nothing = torch.zeros_like(self.mask)
        assert token_metrics(self.learner, self.generator, self.entropy, nothing).values() == {}
