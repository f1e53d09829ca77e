"""Checks everything that a run needs, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from real_ray.config import Config, LearnerConfig, LossConfig
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.run_length import with_num_steps
from real_ray.types import Prompt


def validate(
    config: Config,
    *,
    check_start: Callable[[Config, Sequence[Prompt]], str],
    check_cluster: Callable[[Config], str | None],
) -> Iterator[str]:
    """Check one thing after the other; yield a line on each when it has passed.

    Args:
        check_start: describes where a run on these training prompts would begin.
        check_cluster: describes the cluster that is up, or returns None if there is none.

    Raises:
        ModelError, DataError, ConfigError, CheckpointError, ResourceError: the first thing that is
            wrong.
    """
    from real_ray.data import load_prompts, load_tokenizer
    from real_ray.rewards import load_reward

    yield f"loss:    {_loss_facts(config.loss)}"
    deepspeed_config(config.learner)  # reads the file `learner.deepspeed`
    yield f"learner: {_learner_facts(config.learner)}"
    tokenizer = load_tokenizer(config.model)
    yield f"model:   {config.model.name_or_path}, {len(tokenizer)} tokens in the vocabulary"

    def load(split: Literal["train", "eval"]) -> list[Prompt]:
        return load_prompts(config.data, tokenizer, split=split, seed=config.run.seed)

    train = load("train")
    yield f"train:   {config.data.train}, {_facts(train, config)}"
    if config.data.eval is None:
        yield "eval:    none (data.eval is null)"
    else:
        used = config.eval.num_prompts
        yield f"eval:    {config.data.eval}, {_facts(load('eval'), config)}, the first {used} used"
    config = with_num_steps(config, num_prompts=len(train))
    yield f"run:     {_run_facts(config, num_prompts=len(train))}"
    yield f"start:   {check_start(config, train)}"
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


def _run_facts(config: Config, *, num_prompts: int) -> str:
    per_step = config.learner.prompts_per_step
    num_steps, num_generations = config.num_steps, config.rollout.num_generations
    size = f"{_count(per_step, 'prompt')} x {num_generations} completions"
    facts = [
        f"{_count(num_steps, 'step')} of {size}",
        f"{num_steps * per_step / num_prompts:.3g} passes over the training prompts"
        if config.num_epochs is None
        else f"at most {_count(config.num_epochs, 'epoch')} of the training prompts",
    ]
    if config.num_epochs is None and num_prompts < per_step:
        facts.append("which are fewer than a step has, so that it takes prompts several times")
    facts.append(f"staleness up to {config.rollout.max_staleness}")
    return ", ".join(facts)


def _loss_facts(loss: LossConfig) -> str:
    facts: list[str] = [loss.type]
    if loss.type in ("real", "real_bce"):
        above = loss.positive_above if loss.labels == "threshold" else "the mean of the group"
        facts += [f"tau {loss.tau}", f"positive above {above}"]
    else:
        clips = (loss.epsilon, loss.epsilon_high)
        lower, upper = ("default" if clip is None else clip for clip in clips)
        facts.append(f"clip range {lower} below and {upper} above")
    blend = f" (lambda {loss.blend_lambda})" if loss.old_logprobs == "blend" else ""
    facts.append(f"pi_old {loss.old_logprobs}{blend}")
    if loss.truncated == "exclude":
        facts.append("truncated completions excluded")
    facts.append(f"KL {loss.beta} to the model as given" if loss.beta else "no KL")
    return ", ".join(facts)


def _learner_facts(learner: LearnerConfig) -> str:
    layout = "padded rows"
    if learner.packing:
        layout = "packed" + (" with shared prompts" if learner.share_prefix else "")
    offload = [
        name
        for name, asked in (
            ("optimiser", learner.offload_optimizer),
            ("parameters", learner.offload_params),
        )
        if asked
    ]
    facts = [
        _count(learner.num_ranks, "rank"),
        f"ZeRO stage {learner.zero_stage}"
        + (f" ({' and '.join(offload)} in CPU memory)" if offload else ""),
        learner.dtype,
        f"LoRA of rank {learner.lora_rank} ({learner.lora_sync} to generators)"
        if learner.lora_rank
        else "all parameters",
        f"{layout}, up to {learner.max_tokens_per_microbatch} tokens a micro-batch",
        _count(learner.minibatches_per_batch, "mini-batch", "mini-batches") + " a step",
        f"learning rate {learner.learning_rate}",
    ]
    if learner.deepspeed is not None:
        facts.append(f"DeepSpeed settings of {learner.deepspeed}")
    return ", ".join(facts)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"
