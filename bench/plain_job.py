"""The demo's job as a synchronous Hugging Face loop: generate, score, one optimiser step.

Run by demo_job.py in a process of its own, with flags as `real-ray demo` takes. Writes a JSON
object a step to standard output.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from typing import Any

import numpy as np
import torch
from plain_loop import PlainLoop
from torch import Tensor
from trainers import Settings, Stopwatch

from real_ray.cli import DEMO_CONFIG
from real_ray.config import Config, load_config
from real_ray.config.flags import split_flags
from real_ray.data import PromptCursor, load_prompts, load_tokenizer
from real_ray.rewards import load_reward
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan


def main() -> None:
    job = PlainJob(load_config(DEMO_CONFIG, split_flags(sys.argv[1:])))
    for _ in range(job.config.run.num_steps):
        print(json.dumps(job.step()), flush=True)  # noqa: T201 - what demo_job.py reads


class PlainJob:
    """Prompts, their order, the seed, sampling, reward, loss and optimiser are those of a config.

    Weights are those of `PlainLoop`: in `learner.dtype`, with float32 masters.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tokenizer = load_tokenizer(config.model)
        prompts = load_prompts(config.data, self._tokenizer, split="train", seed=config.run.seed)
        self._cursor = iter(
            PromptCursor(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        )
        self._reward = load_reward(config.reward.function).function
        self._stopwatch = Stopwatch("cpu")
        self._stopwatch.on = True
        self._loop = PlainLoop(
            Settings(
                model=config.model.name_or_path,
                device="cpu",
                dtype=config.learner.dtype,
                seed=config.run.seed,
                learning_rate=config.learner.learning_rate,
                max_grad_norm=config.learner.max_grad_norm,
                temperature=config.rollout.temperature,
                tau=config.loss.tau,
            ),
            self._stopwatch,
        )

    def step(self) -> dict[str, float]:
        """Do a step; return its seconds, CPU seconds, parts and mean reward."""
        self._stopwatch.seconds.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        prompts = [
            draw.prompt for draw in islice(self._cursor, self.config.learner.prompts_per_step)
        ]
        with self._stopwatch.part("generate"):
            sampled = self._generate(prompts)
        with self._stopwatch.part("score"):
            batch = [self._score(group) for group in sampled]
        self._loop.step(batch, max_tokens=self.config.learner.max_tokens_per_microbatch)
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu_began,
            **self._stopwatch.seconds,
            "reward": float(np.mean([group.rewards for group in batch])),
            "tokens": float(sum(len(c.token_ids) for g in sampled for c in g.completions)),
        }

    @torch.no_grad()
    def _generate(self, prompts: list[Prompt]) -> list[SampledGroup]:
        rollout = self.config.rollout
        width = max(len(prompt.token_ids) for prompt in prompts)
        pad = self._tokenizer.pad_token_id
        input_ids = torch.full((len(prompts), width), pad)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids)
            attention_mask[row, width - len(prompt.token_ids) :] = 1
        model = self._loop.model
        model.eval()
        output: Any = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            num_return_sequences=rollout.num_generations,
            do_sample=True,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_completion_length,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.train()
        logprobs = model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        )
        completions = [
            self._completion(index, tokens, its_logprobs)
            for index, (tokens, its_logprobs) in enumerate(
                zip(output.sequences[:, width:], logprobs, strict=True)
            )
        ]
        count = rollout.num_generations
        return [
            SampledGroup(
                prompt=prompt,
                num_generations=count,
                completions=tuple(completions[row * count : (row + 1) * count]),
            )
            for row, prompt in enumerate(prompts)
        ]

    def _completion(self, index: int, tokens: Tensor, logprobs: Tensor) -> Completion:
        """Cut a row of `generate` behind the token that ends it."""
        ends = (tokens == self._tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        token_ids = tokens[:length].numpy().astype(np.int32)
        return Completion(
            index=index % self.config.rollout.num_generations,
            token_ids=token_ids,
            generator_logprobs=logprobs[:length].float().numpy(),
            spans=(VersionSpan(version=0, start=0, end=length),),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason="stop" if len(ends) else "length",
        )

    def _score(self, group: SampledGroup) -> RolloutGroup:
        rewards = self._reward(
            [completion.text for completion in group.completions],
            prompt=group.prompt.text,
            answer=group.prompt.answer,
            columns=group.prompt.columns,
        )
        return RolloutGroup(sampled=group, rewards=np.asarray(rewards, dtype=np.float32))


if __name__ == "__main__":
    main()
