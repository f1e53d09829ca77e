"""The description of the keys, and the hints that lead to them."""

from __future__ import annotations

import re

import pytest

import real_ray.config
from real_ray.config import Config
from real_ray.config.flags import Key, describe_keys
from real_ray.config.foreign import FOREIGN, REFUSED, REFUSED_PREFIXES
from real_ray.config.hints import SHORTHANDS, advise
from real_ray.config.keys import keys_by_name


def key(name: str) -> Key:
    return keys_by_name()[name]


def test_every_field_of_every_section_is_described() -> None:
    fields = [
        f"{section}.{field}"
        for section, info in Config.model_fields.items()
        for field in info.annotation.model_fields  # type: ignore[union-attr]
    ]
    assert [key.name for key in describe_keys()] == fields
    assert all(key.description.endswith(".") for key in describe_keys())


def test_every_section_class_is_exported() -> None:
    for info in Config.model_fields.values():
        assert info.annotation.__name__ in real_ray.config.__all__  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "type_", "default", "bound"),
    [
        ("loss.tau", "a number", "0.5", "> 0, <= 100"),
        ("rollout.num_generations", "a whole number", "8", ">= 2"),
        ("rollout.max_model_length", "a whole number or null", "null", ">= 2"),
        ("rollout.stop", "a list of texts", "[]", ""),
        ("run.overwrite", "true or false", "false", ""),
        ("run.seed", "a whole number", "0", ">= 0, < 2147483648"),
        ("loss.type", "text", "real", "one of real, real_bce, grpo, dapo, gspo"),
        ("loss.epsilon", "a number or null", "null", "> 0, < 1"),
        ("learner.lora_target_modules", "a list of texts", '["all-linear"]', "not empty"),
        ("learner.deepspeed", "text or null", "null", "not empty"),
        ("checkpoint.save_steps", "a whole number or null", "100", ">= 1"),
        ("cluster.device", "text", "auto", "one of auto, cpu, cuda"),
        ("data.train", "text", None, "not empty"),
        ("data.eval", "text or null", "null", "not empty"),
        ("learner.learning_rate", "a number", "2e-06", "> 0, <= 1"),
    ],
)
def test_facts_of_a_key(name: str, type_: str, default: str | None, bound: str) -> None:
    assert (key(name).type, key(name).default, key(name).bound) == (type_, default, bound)


def test_no_bound_is_a_regular_expression() -> None:
    assert not [key.name for key in describe_keys() if "matching" in key.bound]


@pytest.mark.parametrize("target", [*FOREIGN.values(), *SHORTHANDS.values()])
def test_hints_lead_to_keys(target: str) -> None:
    assert target.partition(" ")[0] in keys_by_name()


def test_hints_hide_no_key() -> None:
    fields = {key.field for key in describe_keys()} | set(Config.model_fields)
    assert not fields & (FOREIGN.keys() | REFUSED.keys())
    names = fields | FOREIGN.keys() | REFUSED.keys()
    assert not [name for name in names if name.startswith(tuple(REFUSED_PREFIXES))]


def test_a_name_has_one_hint() -> None:
    assert not FOREIGN.keys() & REFUSED.keys()


@pytest.mark.parametrize("reason", sorted({*REFUSED.values(), *REFUSED_PREFIXES.values()}))
def test_reasons_name_keys_that_exist_and_say_what_to_do(reason: str) -> None:
    named = re.findall(r"\b([a-z]+\.[a-z_]+)\b", reason)
    assert [name for name in named if name not in keys_by_name()] == []
    assert reason.endswith("Remove it")


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ("kl_coef kl_loss_coef init_kl_coef use_kl_loss", "Use `loss.beta`"),
        ("clip_ratio clip_range eps_clip", "Use `loss.epsilon` (grpo, dapo and gspo only"),
        ("clip_ratio_high eps_clip_high", "Use `loss.epsilon_high`"),
        ("ppo_mini_batch_size num_mini_batch", "Use `learner.minibatches_per_batch` (a number of"),
        ("num_iterations ppo_epochs", "no group is trained on twice"),
        ("lora_r r use_lora", "Use `learner.lora_rank`"),
        ("lora_alpha", "belongs to `learner`. Use `learner.lora_alpha`"),
        ("target_modules", "Use `learner.lora_target_modules`"),
        ("vllm_enable_lora", "Use `learner.lora_sync` (set it to adapter)"),
        ("deepspeed ds_config deepspeed_config", "Use `learner.deepspeed`"),
        ("overlong_filter mask_truncated_completions", "`loss.truncated` (set it to exclude)"),
        ("padding_free use_remove_padding packing", "Use `learner.packing`"),
        ("adam_offload optimizer_offload offload_optimizer", "Use `learner.offload_optimizer`"),
        ("param_offload offload_model", "Use `learner.offload_params`"),
        ("real_tau", "Use `loss.tau`"),
        ("importance_sampling_level advantage_estimator", "Use `loss.type`"),
        ("save_steps save_freq", "Use `checkpoint.save_steps`"),
        ("ref_model sync_ref_model", "always the model as given; loss.beta above 0 loads it"),
        ("scale_rewards normalise_rewards whiten_rewards", "Rewards are used as they are"),
        ("tis_imp_ratio_cap rollout_is_threshold", "Importance-sampling corrections"),
        ("vllm_importance_sampling_cap", "Importance-sampling corrections"),
        ("teacher_model teacher_temperature distillation gkd_logits opd_alpha", "no teacher"),
        ("rlsd rlsd_alpha top_entropy_quantile", "All tokens of a completion have the same weight"),
        ("dynamic_sample dynamic_filtering filter_groups", "Use `rollout.dynamic_sampling`"),
        ("max_resample_times", "belongs to `rollout`. Use `rollout.max_resample_times`"),
        ("max_num_gen_batches", "Use `rollout.max_resample_times` (a multiple of"),
        ("over_sampling_batch_size gen_batch_size", "Use `rollout.oversample` (a multiple of"),
        ("partial_rollout", "Use `rollout.in_flight_updates`"),
        ("num_train_epochs epochs total_epochs num_epochs", "Use `run.num_epochs`"),
        ("dataloader_drop_last drop_last", "Use `data.drop_last`"),
        ("save_total_limit max_actor_ckpt_to_keep", "Use `checkpoint.save_total_limit`"),
        ("resume_from_checkpoint resume_mode", "Use `checkpoint.resume`"),
        ("eval_steps test_freq eval_interval", "Use `eval.every`"),
        ("lora_dropout", "LoRA has no dropout"),
    ],
)
def test_names_of_other_trainers(names: str, advice: str) -> None:
    for name in names.split():
        assert advice in advise(name)
        assert advise(f"trainer.{name.replace('_', '-')}") == advise(name)


def test_names_with_several_homes() -> None:
    advice = advise("eval.timeout_s")
    assert "belongs to `rollout` or `reward` or `learner` or `sync`" in advice
    assert "`sync.timeout_s`" in advice
