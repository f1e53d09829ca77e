"""Names that other trainers give to settings: ms-swift, TRL, OpenRLHF, verl."""

from __future__ import annotations

_GROUPS = "learner.prompts_per_step (it counts groups, over all ranks)"
_FOLLOWS = "learner.max_tokens_per_microbatch (the number follows)"
_MINIBATCHES = "learner.minibatches_per_batch (a number of parts, not a size)"
_ONE_PASS = "learner.minibatches_per_batch (parts of a batch; no group is trained on twice)"
_CLIP = "loss.epsilon (grpo, dapo and gspo only: REAL clips nothing)"
_CLIP_HIGH = "loss.epsilon_high (grpo, dapo and gspo only: REAL clips nothing)"
_OVERSAMPLE = "rollout.oversample (a multiple of learner.prompts_per_step, not a number of groups)"
_RESAMPLE = "rollout.max_resample_times (a multiple of learner.prompts_per_step, for one step)"
_KEPT = "checkpoint.save_total_limit"
_RESUME = "checkpoint.resume (auto, never, or a path)"

FOREIGN = {
    "per_device_train_batch_size": _GROUPS,
    "train_batch_size": _GROUPS,
    "global_batch_size": _GROUPS,
    "rollout_batch_size": _GROUPS,
    "batch_size": _GROUPS,
    "generation_batch_size": _GROUPS,
    "gradient_accumulation_steps": _FOLLOWS,
    "micro_batch_size": _FOLLOWS,
    "micro_train_batch_size": _FOLLOWS,
    "train_micro_batch_size_per_gpu": _FOLLOWS,
    "ppo_micro_batch_size": _FOLLOWS,
    "ppo_micro_batch_size_per_gpu": _FOLLOWS,
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "train_max_tokens_per_gpu": "learner.max_tokens_per_microbatch",
    "num_mini_batch": _MINIBATCHES,
    "num_mini_batches": _MINIBATCHES,
    "num_minibatches": _MINIBATCHES,
    "mini_batch_size": _MINIBATCHES,
    "minibatch_size": _MINIBATCHES,
    "ppo_mini_batch_size": _MINIBATCHES,
    "steps_per_generation": _MINIBATCHES,
    "num_iterations": _ONE_PASS,
    "ppo_epochs": _ONE_PASS,
    "max_new_tokens": "rollout.max_completion_length",
    "max_completion_tokens": "rollout.max_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "max_response_length": "rollout.max_completion_length",
    "max_prompt_tokens": "data.max_prompt_length",
    "max_model_len": "rollout.max_model_length",
    "vllm_max_model_len": "rollout.max_model_length",
    "group_size": "rollout.num_generations",
    "n_samples_per_prompt": "rollout.num_generations",
    "n": "rollout.num_generations",
    "stop_words": "rollout.stop",
    "tp_size": "rollout.tensor_parallel_size",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "num_vllm_engines": "rollout.num_generators",
    "vllm_num_engines": "rollout.num_generators",
    "dynamic_sample": "rollout.dynamic_sampling",
    "dynamic_filtering": "rollout.dynamic_sampling",
    "filter_groups": "rollout.dynamic_sampling",
    "max_num_gen_batches": _RESAMPLE,
    "over_sampling_batch_size": _OVERSAMPLE,
    "gen_batch_size": _OVERSAMPLE,
    "partial_rollout": "rollout.in_flight_updates",
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
    "deepspeed_config": "learner.deepspeed",
    "deepspeed_config_file": "learner.deepspeed",
    "ds_config": "learner.deepspeed",
    "adam_offload": "learner.offload_optimizer",
    "optimizer_offload": "learner.offload_optimizer",
    "cpu_offload": "learner.offload_optimizer",
    "offload_optimiser": "learner.offload_optimizer",
    "param_offload": "learner.offload_params (ZeRO 3)",
    "offload_param": "learner.offload_params (ZeRO 3)",
    "offload_model": "learner.offload_params (ZeRO 3)",
    "enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "bf16": "learner.dtype",
    "fp16": "learner.dtype (float16 is not offered)",
    "torch_dtype": "learner.dtype",
    "padding_free": "learner.packing",
    "use_remove_padding": "learner.packing",
    "remove_padding": "learner.packing",
    "packing_samples": "learner.packing",
    "lora_r": "learner.lora_rank",
    "r": "learner.lora_rank",
    "use_lora": "learner.lora_rank (above 0 turns LoRA on)",
    "use_peft": "learner.lora_rank (above 0 turns LoRA on)",
    "train_type": "learner.lora_rank (above 0 turns LoRA on)",
    "tuner_type": "learner.lora_rank (above 0 turns LoRA on)",
    "target_modules": "learner.lora_target_modules",
    "vllm_enable_lora": "learner.lora_sync (set it to adapter)",
    "max_steps": "run.num_steps",
    "total_steps": "run.num_steps",
    "epochs": "run.num_epochs",
    "total_epochs": "run.num_epochs",
    "num_train_epochs": "run.num_epochs",
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
    "dataloader_drop_last": "data.drop_last",
    "reward_funcs": "reward.function",
    "reward_functions": "reward.function",
    "functions": "reward.function",
    "loss_type": "loss.type",
    "rlhf_type": "loss.type",
    "advantage_estimator": "loss.type (grpo, dapo and gspo have their own advantages, REAL none)",
    "adv_estimator": "loss.type (grpo, dapo and gspo have their own advantages, REAL none)",
    "importance_sampling_level": "loss.type (grpo, dapo: token; gspo: sequence; REAL has no ratio)",
    "temperature_tau": "loss.tau",
    "real_tau": "loss.tau",
    "kl_coef": "loss.beta",
    "kl_loss_coef": "loss.beta",
    "init_kl_coef": "loss.beta",
    "kl_beta": "loss.beta",
    "use_kl_loss": "loss.beta (above 0 turns the KL term on)",
    "clip_ratio": _CLIP,
    "clip_ratio_low": _CLIP,
    "clip_range": _CLIP,
    "cliprange": _CLIP,
    "eps_clip": _CLIP,
    "epsilon_low": _CLIP,
    "clip_ratio_high": _CLIP_HIGH,
    "eps_clip_high": _CLIP_HIGH,
    "overlong_filter": "loss.truncated (set it to exclude)",
    "mask_truncated_completions": "loss.truncated (set it to exclude)",
    "save_freq": "checkpoint.save_steps",
    "save_interval": "checkpoint.save_steps",
    "max_ckpt_num": _KEPT,
    "max_actor_ckpt_to_keep": _KEPT,
    "resume_from_checkpoint": _RESUME,
    "resume_mode": _RESUME,
    "load_checkpoint": _RESUME,
    "eval_steps": "eval.every",
    "eval_interval": "eval.every",
    "test_freq": "eval.every",
    "report_to": "tracking.wandb",
    "log_completions": "tracking.samples",
}
"""Name elsewhere -> the key here that does its work, and a note on what differs."""

_REWARDS = (
    "Rewards are used as they are: real and real_bce read them as labels (loss.labels), grpo, "
    "dapo and gspo normalise them within the group by themselves. Remove it"
)
_CORRECTION = (
    "Importance-sampling corrections multiply the losses of tokens, which REAL does not have, and "
    "no loss here applies one: rollout.max_staleness bounds how old samples are. Remove it"
)
_REFERENCE = (
    "The reference of the KL term is always the model as given; loss.beta above 0 loads it. "
    "Remove it"
)
_KL_IN_LOSS = (
    "The KL term is part of the loss, with the k3 estimator, and its weight is loss.beta. Remove it"
)
_TEACHER = (
    "There is no teacher: completions are classified or weighted by their rewards alone, and no "
    "loss here has a distillation term. Remove it"
)
_TOKEN_WEIGHTS = (
    "All tokens of a completion have the same weight: a score is the plain mean over them, and the "
    "advantages of grpo, dapo and gspo belong to whole completions. Remove it"
)
_NO_DROPOUT = (
    "LoRA has no dropout here: the policy that is trained must be the one that sampled. Remove it"
)

REFUSED = {
    **dict.fromkeys(
        (
            "scale_rewards",
            "normalize_rewards",
            "normalise_rewards",
            "normalize_reward",
            "reward_normalization",
            "reward_normalisation",
            "reward_scale",
            "reward_scaling",
            "reward_clip_range",
            "whiten_rewards",
            "normalize_advantages",
            "norm_adv_by_std_in_grpo",
            "no_advantage_std_norm",
        ),
        _REWARDS,
    ),
    **dict.fromkeys(
        (
            "tis_threshold",
            "tis_imp_ratio_cap",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_mode",
            "rollout_importance_sampling_mode",
            "rollout_importance_sampling_threshold",
            "enable_vllm_is_correction",
            "vllm_is_truncated_threshold",
            "rollout_is",
            "rollout_is_threshold",
        ),
        _CORRECTION,
    ),
    **dict.fromkeys(
        (
            "ref_model",
            "ref_model_path",
            "reference_model",
            "sync_ref_model",
            "ref_model_sync_steps",
            "ref_model_mixup_alpha",
        ),
        _REFERENCE,
    ),
    **dict.fromkeys(
        ("kl_in_reward", "use_kl_in_reward", "kl_loss_type", "kl_estimator"), _KL_IN_LOSS
    ),
    **dict.fromkeys(("teacher", "gkd", "opd", "use_opd", "seq_kd"), _TEACHER),
    **dict.fromkeys(
        (
            "rlsd",
            "token_reweighting",
            "token_weighting",
            "token_level_reweighting",
            "advantage_reweighting",
            "top_entropy_quantile",
            "token_entropy_percentile_threshold",
        ),
        _TOKEN_WEIGHTS,
    ),
    "lora_dropout": _NO_DROPOUT,
}
"""Names elsewhere of what no loss here does, and why."""

REFUSED_PREFIXES = {
    "teacher_": _TEACHER,
    "distill": _TEACHER,
    "gkd_": _TEACHER,
    "opd_": _TEACHER,
    "rlsd_": _TOKEN_WEIGHTS,
}
"""Starts of such names, where there are many."""
