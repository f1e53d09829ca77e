"""What to write instead of a key that does not exist."""

from __future__ import annotations

from difflib import get_close_matches

from real_ray.config.keys import describe_keys, keys_by_name, sections

SHORTHANDS = {
    "model": "model.name_or_path",
    "data": "data.train",
    "reward": "reward.function",
    "loss": "loss.type",
}
"""Sections that people write as one value, and the key that they mean."""

FOREIGN = {
    "per_device_train_batch_size": "learner.prompts_per_step (it counts groups, over all ranks)",
    "train_batch_size": "learner.prompts_per_step (it counts groups, over all ranks)",
    "global_batch_size": "learner.prompts_per_step (it counts groups, over all ranks)",
    "rollout_batch_size": "learner.prompts_per_step (it counts groups, over all ranks)",
    "batch_size": "learner.prompts_per_step (it counts groups, over all ranks)",
    "gradient_accumulation_steps": "learner.max_tokens_per_microbatch (the number follows)",
    "micro_batch_size": "learner.max_tokens_per_microbatch (the number follows)",
    "max_new_tokens": "rollout.max_completion_length",
    "max_completion_tokens": "rollout.max_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "max_response_length": "rollout.max_completion_length",
    "max_prompt_tokens": "data.max_prompt_length",
    "max_model_len": "rollout.max_model_length",
    "group_size": "rollout.num_generations",
    "n_samples_per_prompt": "rollout.num_generations",
    "n": "rollout.num_generations",
    "tp_size": "rollout.tensor_parallel_size",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "num_vllm_engines": "rollout.num_generators",
    "vllm_num_engines": "rollout.num_generators",
    "max_off_policy_steps": "rollout.max_staleness",
    "staleness": "rollout.max_staleness",
    "lr": "learner.learning_rate",
    "actor_learning_rate": "learner.learning_rate",
    "lr_scheduler": "learner.lr_schedule",
    "lr_scheduler_type": "learner.lr_schedule",
    "warmup_steps": "learner.warmup_ratio (a share of run.num_steps)",
    "clip_grad": "learner.max_grad_norm",
    "max_norm": "learner.max_grad_norm",
    "adam_betas": "learner.adam_beta1 and learner.adam_beta2",
    "deepspeed": "learner.zero_stage",
    "bf16": "learner.dtype",
    "fp16": "learner.dtype (float16 is not offered)",
    "torch_dtype": "learner.dtype",
    "max_steps": "run.num_steps",
    "total_steps": "run.num_steps",
    "epochs": "run.num_steps (it counts optimiser steps)",
    "num_epochs": "run.num_steps (it counts optimiser steps)",
    "num_train_epochs": "run.num_steps (it counts optimiser steps)",
    "experiment_name": "run.name",
    "run_name": "run.name",
    "model_name_or_path": "model.name_or_path",
    "model_path": "model.name_or_path",
    "pretrain": "model.name_or_path",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "prompt_data": "data.train",
    "train_files": "data.train",
    "val_files": "data.eval",
    "eval_dataset": "data.eval",
    "system": "data.system_prompt",
    "reward_funcs": "reward.function",
    "reward_functions": "reward.function",
    "functions": "reward.function",
    "loss_type": "loss.type",
    "temperature_tau": "loss.tau",
    "report_to": "tracking.wandb",
    "log_completions": "tracking.samples",
}
"""Names of other trainers, and the key here that does their work."""

_NO_KL = "REAL has no KL term in this version and loads no reference model. Remove it"
_NO_NORMALISATION = (
    "REAL reads rewards as labels (positive above loss.positive_above), so rewards are never "
    "scaled or normalised. Remove it"
)
_NO_RATIO = "REAL has no importance ratio and clips nothing. Remove it"

REFUSED = {
    **dict.fromkeys(
        ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "use_kl_loss", "ref_model"), _NO_KL
    ),
    **dict.fromkeys(
        (
            "scale_rewards",
            "normalize_rewards",
            "normalise_rewards",
            "reward_normalization",
            "reward_normalisation",
            "normalize_advantages",
            "norm_adv_by_std_in_grpo",
            "advantage_estimator",
            "adv_estimator",
        ),
        _NO_NORMALISATION,
    ),
    **dict.fromkeys(
        (
            "tis_threshold",
            "tis_imp_ratio_cap",
            "importance_sampling_level",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_cap",
            "clip_ratio",
            "clip_range",
            "eps_clip",
            "epsilon",
            "epsilon_high",
        ),
        _NO_RATIO,
    ),
}
"""Names of other trainers that mean nothing in REAL, and why."""


def advise(name: str) -> str:
    """What to write instead of the unknown key ``name`` ("loss.tua", "lr", "trainer.lr")."""
    if name in keys_by_name():  # in a file, where a dotted name is no key
        return "Write `{0}:` and below it, indented, `{2}:`".format(*name.partition("."))
    section, _, field = name.replace("-", "_").lower().rpartition(".")
    if field in REFUSED:
        return REFUSED[field]
    if field in FOREIGN:
        key, _, note = FOREIGN[field].partition(" ")
        return f"Use `{key}` {note}".rstrip()
    if not section and field in sections():
        example = SHORTHANDS.get(field) or _in_section(field)[0]
        return f"`{field}` is a section. Name a key of it, as in `{example}`"
    owners = [key.name for key in describe_keys() if key.field == field]
    if owners:
        homes = _either([owner.partition(".")[0] for owner in owners])
        return f"`{field}` belongs to {homes}. Use {_either(owners)}"
    if near := _nearest(section, field):
        return f"Did you mean {_either(near)}?"
    if section in sections():
        return f"The keys of `{section}` are {', '.join(_in_section(section))}"
    return f"The sections are {', '.join(sections())}"


def _nearest(section: str, field: str) -> list[str]:
    pools = [
        {key.field: key.name for key in describe_keys() if key.section == section},
        {key.field: key.name for key in describe_keys()},
    ]
    if not section:
        pools[0] = {name: name for name in sections()}
    for pool in pools:
        if near := get_close_matches(field, pool, n=2, cutoff=0.65):
            return [pool[name] for name in near]
    return []


def _in_section(section: str) -> list[str]:
    return [key.name for key in describe_keys() if key.section == section]


def _either(names: list[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)
