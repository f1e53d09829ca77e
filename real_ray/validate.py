"""Checks everything that a run needs, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from real_ray.config import Config
from real_ray.types import Prompt


def validate(config: Config, *, check_cluster: Callable[[Config], str | None]) -> Iterator[str]:
    """Check one thing after the other; yield a line on each when it has passed.

    Args:
        check_cluster: describes the cluster that is up, or returns None if there is none.

    Raises:
        ModelError, DataError, ConfigError, ResourceError: the first thing that is wrong.
    """
    from real_ray.data import load_prompts, load_tokenizer
    from real_ray.rewards import load_reward

    yield (
        f"run:     {config.run.num_steps} steps of {config.learner.prompts_per_step} prompts x "
        f"{config.rollout.num_generations} completions, staleness up to "
        f"{config.rollout.max_staleness}, into {config.run.output_dir}/{config.run.name}"
    )
    yield (
        f"loss:    {config.loss.type}, tau {config.loss.tau}, positive above "
        f"{config.loss.positive_above}; learning rate {config.learner.learning_rate}"
    )
    tokenizer = load_tokenizer(config.model)
    yield f"model:   {config.model.name_or_path}, {len(tokenizer)} tokens in the vocabulary"

    def load(split: Literal["train", "eval"]) -> list[Prompt]:
        return load_prompts(config.data, tokenizer, split=split, seed=config.run.seed)

    yield f"train:   {config.data.train}, {_facts(load('train'), config)}"
    if config.data.eval is None:
        yield "eval:    none (data.eval is null)"
    else:
        used = config.eval.num_prompts
        yield f"eval:    {config.data.eval}, {_facts(load('eval'), config)}, the first {used} used"
    load_reward(config.reward.function)
    yield f"reward:  {config.reward.function}, {config.reward.num_workers} workers"
    cluster = check_cluster(config)
    yield f"cluster: {cluster or 'none is up; CPUs and ports of this machine suffice'}"


def _facts(prompts: Sequence[Prompt], config: Config) -> str:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return (
        f"{len(prompts)} rows, prompts of {min(lengths)} to {max(lengths)} tokens "
        f"(at most {config.data.max_prompt_length})"
    )
