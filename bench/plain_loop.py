"""The same optimiser step as a loop over a Hugging Face model, without real-ray's learner."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from trainers import Settings, StepInfo, Stopwatch
from transformers import AutoModelForCausalLM

from real_ray.loss import group_loss
from real_ray.types import RolloutGroup


class PlainLoop:
    """Padded rows, logits of the completions, log-softmax in float32, REAL by autograd, AdamW.

    Weights in bfloat16 have float32 master weights, as in the learner. A micro-batch is as many
    whole groups as the budget has room for, and at least one: a loss by autograd cannot cut them.
    """

    def __init__(self, settings: Settings, stopwatch: Stopwatch) -> None:
        if settings.device == "cpu":
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._stopwatch = stopwatch
        self.model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        ).to(settings.device)
        self.model.train()
        self._parameters = list(self.model.parameters())
        self._masters = (
            self._parameters
            if settings.dtype == "float32"
            else [p.detach().float().requires_grad_() for p in self._parameters]
        )
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=settings.learning_rate, weight_decay=0.0, fused=True
        )

    def step(self, batch: list[RolloutGroup], *, max_tokens: int) -> StepInfo:
        microbatches = list(_microbatches(batch, max_tokens))
        for groups in microbatches:
            with self._stopwatch.part("forward"):
                loss = self._losses(groups).sum() / len(batch)
            with self._stopwatch.part("backward"):
                torch.autograd.backward(loss)
        with self._stopwatch.part("update"):
            grad_norm = self._update()
        return StepInfo(grad_norm=grad_norm, num_microbatches=len(microbatches), num_score_passes=0)

    def _losses(self, groups: list[RolloutGroup]) -> Tensor:
        """REAL loss of each group: [G]."""
        rows = [(g.sampled.prompt.token_ids, c) for g in groups for c in g.sampled.completions]
        num_prompt = max(len(prompt) for prompt, _ in rows)
        width = max(len(completion.token_ids) for _, completion in rows)
        input_ids = torch.zeros(len(rows), num_prompt + width, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        old_logprobs = torch.zeros(len(rows), width)
        for row, (prompt, completion) in enumerate(rows):
            first, last = num_prompt - len(prompt), num_prompt + len(completion.token_ids)
            tokens = np.concatenate([prompt, completion.token_ids])
            input_ids[row, first:last] = torch.from_numpy(tokens)
            attention_mask[row, first:last] = 1
            logprobs = torch.from_numpy(completion.generator_logprobs)
            old_logprobs[row, : len(logprobs)] = logprobs
        device = self._settings.device
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=width + 1,
            use_cache=False,
        )
        logits = output.logits[:, :-1].float() / self._settings.temperature
        completion_ids, mask = input_ids[:, num_prompt:], attention_mask[:, num_prompt:]
        all_logprobs = torch.log_softmax(logits, dim=-1)
        logprobs = all_logprobs.gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
        ratios = (logprobs - old_logprobs.to(device)) * mask
        scores = ratios.sum(dim=1) / mask.sum(dim=1)
        rewards = torch.from_numpy(np.stack([group.rewards for group in groups])).to(device)
        return group_loss(scores.view_as(rewards), rewards > 0, self._settings.tau)

    @torch.no_grad()
    def _update(self) -> float:
        """Clip the gradient, step the optimiser, and return the norm of the gradient."""
        is_copy = self._masters is not self._parameters
        if is_copy:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if is_copy:
            torch._foreach_copy_(self._parameters, self._masters)
        return float(norm)


def _microbatches(batch: list[RolloutGroup], max_tokens: int) -> Iterator[list[RolloutGroup]]:
    chosen: list[RolloutGroup] = []
    for group in batch:
        if chosen and _num_tokens([*chosen, group]) > max_tokens:
            yield chosen
            chosen = []
        chosen.append(group)
    yield chosen


def _num_tokens(groups: list[RolloutGroup]) -> int:
    """Padding included."""
    longest_prompt = max(len(group.sampled.prompt.token_ids) for group in groups)
    completions = [c for group in groups for c in group.sampled.completions]
    return len(completions) * (longest_prompt + max(len(c.token_ids) for c in completions))
