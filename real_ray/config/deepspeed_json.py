"""What `deepspeed.initialize` is given: the keys of the config, and the user's JSON file.

Key names and meanings are those of ``deepspeed/runtime/config.py``, release 0.19. A key that is
``"auto"``, as in the files that Hugging Face trainers take, or null is left to real-ray, or else to
DeepSpeed's default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from real_ray.config.learner import LearnerConfig
from real_ray.errors import ConfigError

AUTO = "auto"

KEYS = {
    "train_batch_size": "learner.prompts_per_step",
    "train_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "learner.max_tokens_per_microbatch",
    "gradient_clipping": "learner.max_grad_norm",
    "bf16.enabled": "learner.dtype",
    "bfloat16": "learner.dtype",
    "bfloat16.enabled": "learner.dtype",
    "fp16.enabled": "learner.dtype",
    "torch_autocast": "learner.dtype",
    "torch_autocast.enabled": "learner.dtype",
    "optimizer": "learner.learning_rate, learner.weight_decay and learner.adam_beta1",
    "optimizer.params.lr": "learner.learning_rate",
    "optimizer.params.betas": "learner.adam_beta1 and learner.adam_beta2",
    "optimizer.params.weight_decay": "learner.weight_decay",
    "scheduler": "learner.lr_schedule and learner.warmup_ratio",
    "zero_optimization.stage": "learner.zero_stage",
    "zero_optimization.offload_optimizer.device": "learner.offload_optimizer",
    "zero_optimization.cpu_offload": "learner.offload_optimizer",
    "zero_optimization.offload_param.device": "learner.offload_params",
    "zero_optimization.cpu_offload_param": "learner.offload_params",
    "tensor_parallel": "learner.num_ranks",
    "sequence_parallel_size": "learner.num_ranks",
}
"""Path of a JSON key, or of a whole block -> the keys of the config that decide it."""

_FIXED = {
    "optimizer.type": "the learner's optimiser is torch's AdamW",
    "bf16.bf16_master_weights_and_grads": "master weights are float32",
    "bf16.bf16_optimizer_states": "the optimiser's state is float32",
    "bf16.check_grad_overflow": "steps without a finite gradient are skipped",
    "data_types.grad_accum_dtype": "gradients of micro-batches add up in float32 (ZeRO 2 and 3)",
    "zero_optimization.compute_grad_norm": "steps without a finite gradient are skipped",
    "gradient_allreduce_op": "the loss of a rank is scaled for the mean over ranks",
    "managed_gradient_accumulation": "the learner marks the last micro-batch of a step itself",
    "zero_allow_untested_optimizer": "the learner's optimiser is torch's AdamW",
    "zero_force_ds_cpu_optimizer": "the learner's optimiser is torch's AdamW",
}
"""Path of a JSON key that no key of the config decides -> why it has the value it has."""

_REMOVED = (
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients"),
    *("eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
    *("curriculum_learning", "progressive_layer_drop", "zero_optimization.mics_shard_size"),
    *("zero_optimization.mics_hierarchical_params_gather", "zero_optimization.zeropp_loco_param"),
)
"""Keys of older releases; this one ends with an error wherever they stand."""

_CHECKED_ONLY = ("optimizer", "scheduler", "fp16", "bfloat16", "torch_autocast")
"""Blocks that are not passed on: the optimiser and its schedule are objects, the others are off."""


def deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    """Return the settings for `deepspeed.initialize`, as a new dict.

    Reads the file `learner.deepspeed`, if there is one: to be called where that file is, which on a
    cluster is the driver and not the learner.

    Raises:
        ConfigError: the file is missing or no JSON object, or, with one line for each key, it
            disagrees with the config.
    """
    ours = _settings(config)
    if config.deepspeed is None:
        return ours
    path = Path(config.deepspeed)
    written = _read_json(path)
    decided = _decided(config)
    problems = list(_problems(written, decided))
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    passed = {name: value for name, value in written.items() if name not in _CHECKED_ONLY}
    return _merge(_left_open(passed, decided), ours)


def _settings(config: LearnerConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload_params:
        zero["offload_param"] = {"device": "cpu"}
    return {
        # The learner cuts micro-batches and marks the last of a step itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_optimization": zero,
        # torch's AdamW needs no compiler at run time, unlike DeepSpeed's own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": _accumulation(config)},
        "steps_per_print": 2**31,
    }


def _accumulation(config: LearnerConfig) -> str | None:
    """Where the gradients of micro-batches add up: a sum in bfloat16 would lose small ones.

    ZeRO 0 and 1 cannot, or only with an optimiser that does not skip steps; null: `dtype`.
    """
    return "fp32" if config.zero_stage >= 2 else None


def _decided(config: LearnerConfig) -> dict[str, Any]:
    """Path of a JSON key -> the only value that a file may give it."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "bf16.enabled": config.dtype == "bfloat16",
        "bfloat16.enabled": config.dtype == "bfloat16",
        "bf16.bf16_master_weights_and_grads": False,
        "bf16.bf16_optimizer_states": False,
        "bf16.check_grad_overflow": True,
        "fp16.enabled": False,
        "torch_autocast.enabled": False,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": config.learning_rate,
        "optimizer.params.betas": [config.adam_beta1, config.adam_beta2],
        "optimizer.params.weight_decay": config.weight_decay,
        "zero_optimization.stage": config.zero_stage,
        "zero_optimization.offload_optimizer.device": "cpu" if config.offload_optimizer else "none",
        "zero_optimization.cpu_offload": config.offload_optimizer,
        "zero_optimization.offload_param.device": "cpu" if config.offload_params else "none",
        "zero_optimization.cpu_offload_param": config.offload_params,
        "data_types.grad_accum_dtype": _accumulation(config),
        "zero_optimization.compute_grad_norm": True,
        "gradient_allreduce_op": "mean",
        "managed_gradient_accumulation": True,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        written = json.loads(text, object_pairs_hook=_unique)
    except FileNotFoundError:
        raise ConfigError(
            f"learner.deepspeed: no such file {path}. Check the path, which is relative to the "
            "directory that real-ray is started in"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8. Save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"learner.deepspeed: {path} cannot be read: {error.strerror}. Give the path of a JSON "
            "file"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}. Check quotes, "
            "commas and brackets there; JSON has no comments"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: brackets are nested too deeply") from None
    except _RepeatedKeyError as error:
        raise ConfigError(f"{path}: {error}: repeated key. Keep one of the two") from None
    if not isinstance(written, dict):
        raise ConfigError(
            f"{path}: the file must hold a JSON object (got {json.dumps(written)[:80]}). Write it "
            'as in {"zero_optimization": {"overlap_comm": true}}'
        )
    return written


class _RepeatedKeyError(ValueError):
    """A JSON object has the same key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedKeyError(name)
        found[name] = value
    return found


def _problems(
    written: Mapping[str, Any], decided: Mapping[str, Any], prefix: str = "", block: str = ""
) -> Iterator[str]:
    """What is wrong with the keys below ``prefix``, which are in the block of `KEYS` ``block``."""
    for name, value in written.items():
        path = f"{prefix}{name}"
        if _is_open(value):
            continue
        if path in decided:
            if not _same(value, decided[path]):
                yield _disagreement(path, value, decided[path])
        elif path in _REMOVED:
            yield f"{path}: this release of DeepSpeed does not have it. Remove it"
        elif isinstance(value, dict):
            yield from _problems(value, decided, f"{path}.", path if path in KEYS else block)
        elif any(known.startswith(f"{path}.") for known in decided):
            yield f'{path}: must be an object with keys in it (got {_shown(value)}), or "auto"'
        elif (refused := path if path in KEYS else block) in KEYS:
            yield (
                f"{path} is {_shown(value)}, and is not read from the file. Use {KEYS[refused]}, "
                f'and remove {refused} or write "auto"'
            )


def _disagreement(path: str, value: Any, ours: Any) -> str:
    both = f"{path} is {_shown(value)}, and real-ray sets {_shown(ours)}"
    if path in _FIXED:
        return f'{both}, because {_FIXED[path]}. Remove it or write "auto"'
    return f'{both} ({KEYS[path]}). Change the latter, and remove {path} here or write "auto"'


def _is_open(value: Any) -> bool:
    return value is None or value == AUTO


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):  # true is not 1
        return left is right
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return bool(left == right)


def _left_open(
    written: Mapping[str, Any], decided: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """The keys that the file has a value for and real-ray has not."""
    return {
        name: _left_open(value, decided, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in written.items()
        if f"{prefix}{name}" not in decided and not _is_open(value)
    }


def _merge(theirs: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Both; of a key in both, what real-ray sets, except for how often DeepSpeed prints."""
    merged = dict(theirs)
    for name, value in ours.items():
        if isinstance(value, dict):
            merged[name] = _merge(merged.get(name, {}), value)
        elif name != "steps_per_print":
            merged[name] = value
        else:
            merged.setdefault(name, value)
    return merged


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
