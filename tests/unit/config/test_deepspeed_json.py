"""What DeepSpeed is given: the config's own settings, and the rest of the user's file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from real_ray.config import LearnerConfig
from real_ray.config.deepspeed_json import KEYS, deepspeed_config
from real_ray.config.keys import keys_by_name
from real_ray.errors import ConfigError

Merge = Callable[..., dict[str, Any]]

# As ms-swift, TRL and LLaMA-Factory ship them, for ZeRO stage 2 and 3.
ZERO_2 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO_3 = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "zero_allow_untested_optimizer": True,
    "train_batch_size": "auto",
}


@pytest.fixture
def merge(tmp_path: Path) -> Merge:
    """Settings of a learner with this file (text, or what is written as JSON) and these keys."""

    def merge(written: object, **keys: Any) -> dict[str, Any]:
        path = tmp_path / "ds.json"
        path.write_bytes(
            written if isinstance(written, bytes) else json.dumps(written).encode("utf-8")
        )
        return deepspeed_config(LearnerConfig(deepspeed=str(path), **keys))

    return merge


def problems(merge: Merge, written: object, **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        merge(written, **keys)
    return str(caught.value).splitlines()


def only_problem(merge: Merge, written: object, **keys: Any) -> str:
    found = problems(merge, written, **keys)
    assert len(found) == 1, found
    return found[0]


class TestWithoutFile:
    def test_settings_of_the_config(self) -> None:
        config = LearnerConfig(max_grad_norm=0.5, zero_stage=1, dtype="float32")
        assert deepspeed_config(config) == {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": False},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": None},
            "steps_per_print": 2**31,
        }

    @pytest.mark.parametrize("stage", [2, 3])
    def test_gradients_of_micro_batches_add_up_in_float32(self, stage: int) -> None:
        config = deepspeed_config(LearnerConfig(zero_stage=stage, dtype="bfloat16"))
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}

    def test_offloading(self) -> None:
        config = LearnerConfig(zero_stage=3, offload_optimizer=True, offload_params=True)
        assert deepspeed_config(config)["zero_optimization"] == {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }

    def test_bfloat16_is_the_default(self) -> None:
        assert deepspeed_config(LearnerConfig())["bf16"] == {"enabled": True}


class TestMerge:
    @pytest.mark.parametrize("written", [{}, {"bf16": {"enabled": "auto"}, "fp16": None}])
    def test_nothing_of_its_own(self, merge: Merge, written: object) -> None:
        assert merge(written) == deepspeed_config(LearnerConfig())

    def test_a_file_of_hugging_face_trainers(self, merge: Merge) -> None:
        assert merge(ZERO_2) == {
            **deepspeed_config(LearnerConfig()),
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"pin_memory": True},
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        }

    def test_auto_leaves_a_key_to_deepspeed(self, merge: Merge) -> None:
        keys = {"zero_stage": 3, "offload_optimizer": True, "offload_params": True}
        merged = merge(ZERO_3, **keys)
        assert "auto" not in json.dumps(merged)
        assert merged == {
            **deepspeed_config(LearnerConfig(**keys)),
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "sub_group_size": 1e9,
            },
        }

    def test_deepspeed_takes_what_comes_out(
        self, merge: Merge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        from deepspeed.runtime.config import DeepSpeedConfig

        two = DeepSpeedConfig(merge(ZERO_2))
        assert two.zero_config.stage == 2
        assert two.zero_config.offload_optimizer.device == "none"
        assert two.zero_config.reduce_bucket_size == 2e8
        assert (two.bfloat16_config.enabled, two.gradient_clipping) == (True, 1.0)
        keys = {"zero_stage": 3, "offload_optimizer": True, "offload_params": True}
        three = DeepSpeedConfig(merge(ZERO_3, **keys))
        assert three.zero_config.offload_param.device == "cpu"
        assert three.zero_config.reduce_bucket_size == 5e8
        assert (three.optimizer_name, three.scheduler_name) == (None, None)

    @pytest.mark.parametrize(
        "written",
        [
            {"gradient_clipping": 1},
            {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1},
            {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
            {"bfloat16": {"enabled": True}, "torch_autocast": {"enabled": False}},
            {"zero_optimization": {"stage": 2, "cpu_offload": False}},
            {"zero_optimization": {"stage": 2, "cpu_offload_param": False}},
            {"optimizer": {"type": "adamw", "params": {"lr": 2e-6, "betas": [0.9, 0.999]}}},
            {"optimizer": "auto", "scheduler": "auto", "train_batch_size": "auto"},
            {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True},
        ],
        ids=str,
    )
    def test_what_agrees_is_accepted(self, merge: Merge, written: object) -> None:
        assert merge(written) == deepspeed_config(LearnerConfig())

    def test_the_config_is_not_shared(self, merge: Merge) -> None:
        merge({})["zero_optimization"]["stage"] = 9
        assert merge({})["zero_optimization"]["stage"] == 2


class TestDisagreement:
    @pytest.mark.parametrize(
        "case",
        [
            ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", 3, 2, "zero_stage"),
            ({"gradient_clipping": 0.3}, "gradient_clipping", 0.3, 1.0, "max_grad_norm"),
            ({"gradient_clipping": True}, "gradient_clipping", True, 1.0, "max_grad_norm"),
            ({"gradient_clipping": {}}, "gradient_clipping", {}, 1.0, "max_grad_norm"),
            ({"bf16": {"enabled": False}}, "bf16.enabled", False, True, "dtype"),
            ({"bfloat16": {"enabled": False}}, "bfloat16.enabled", False, True, "dtype"),
            ({"fp16": {"enabled": True}}, "fp16.enabled", True, False, "dtype"),
            ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled", True, False, "dtype"),
            (
                {"train_micro_batch_size_per_gpu": 4},
                "train_micro_batch_size_per_gpu",
                4,
                1,
                "max_tokens_per_microbatch",
            ),
            (
                {"gradient_accumulation_steps": 8},
                "gradient_accumulation_steps",
                8,
                1,
                "max_tokens_per_microbatch",
            ),
            (
                {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                "zero_optimization.offload_optimizer.device",
                "cpu",
                "none",
                "offload_optimizer",
            ),
            (
                {"zero_optimization": {"offload_param": {"device": "nvme"}}},
                "zero_optimization.offload_param.device",
                "nvme",
                "none",
                "offload_params",
            ),
            (
                {"zero_optimization": {"cpu_offload": True}},
                "zero_optimization.cpu_offload",
                True,
                False,
                "offload_optimizer",
            ),
            (
                {"optimizer": {"params": {"lr": 1e-5}}},
                "optimizer.params.lr",
                1e-5,
                2e-6,
                "learning_rate",
            ),
            (
                {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
                "optimizer.params.betas",
                [0.9, 0.95],
                [0.9, 0.999],
                "adam_beta1 and learner.adam_beta2",
            ),
        ],
        ids=str,
    )
    def test_both_values_and_the_key_are_named(
        self, merge: Merge, tmp_path: Path, case: tuple[object, str, object, object, str]
    ) -> None:
        written, path, theirs, ours, key = case
        message = only_problem(merge, written)
        assert message.startswith(
            f"{tmp_path / 'ds.json'}: {path} is {json.dumps(theirs)}, and real-ray sets "
            f"{json.dumps(ours)} (learner.{key}). "
        )
        assert message.endswith(f'remove {path} here or write "auto"')

    @pytest.mark.parametrize(
        ("written", "path", "key"),
        [
            ({"train_batch_size": 64}, "train_batch_size", "learner.prompts_per_step"),
            (
                {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
                "scheduler.type",
                "learner.lr_schedule and learner.warmup_ratio",
            ),
            ({"optimizer": {"params": {"eps": 1e-6}}}, "optimizer.params.eps", "learner.learning"),
            ({"torch_autocast": {"dtype": "fp16"}}, "torch_autocast.dtype", "learner.dtype"),
            (
                {"tensor_parallel": {"autotp_size": 2}},
                "tensor_parallel.autotp_size",
                "learner.num_ranks",
            ),
            ({"sequence_parallel_size": 2}, "sequence_parallel_size", "learner.num_ranks"),
        ],
        ids=str,
    )
    def test_what_is_not_read_from_the_file(
        self, merge: Merge, written: object, path: str, key: str
    ) -> None:
        message = only_problem(merge, written)
        assert f"ds.json: {path} is " in message
        assert f"not read from the file. Use {key}" in message

    @pytest.mark.parametrize(
        ("written", "reason"),
        [
            ({"optimizer": {"type": "Lamb"}}, "torch's AdamW"),
            ({"zero_force_ds_cpu_optimizer": True}, "torch's AdamW"),
            ({"bf16": {"bf16_master_weights_and_grads": True}}, "master weights are float32"),
            ({"gradient_allreduce_op": "sum"}, "mean over ranks"),
        ],
        ids=str,
    )
    def test_what_no_key_decides_has_a_reason(
        self, merge: Merge, written: object, reason: str
    ) -> None:
        assert reason in only_problem(merge, written)

    @pytest.mark.parametrize(
        "written",
        [
            {"elasticity": {"enabled": False}},
            {"amp": {}},
            {"zero_optimization": {"mics_shard_size": 4}},
        ],
        ids=str,
    )
    def test_what_deepspeed_has_removed(self, merge: Merge, written: object) -> None:
        assert "does not have it. Remove it" in only_problem(merge, written)

    @pytest.mark.parametrize("value", [True, 2, "stage2", []], ids=str)
    def test_a_value_for_a_block(self, merge: Merge, value: object) -> None:
        message = only_problem(merge, {"zero_optimization": value})
        assert (
            f"zero_optimization: must be an object with keys in it (got {json.dumps(value)})"
            in (message)
        )

    def test_all_at_once(self, merge: Merge) -> None:
        written = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}, "amp": {}}
        assert len(problems(merge, written)) == 3

    def test_keys_that_are_named_exist(self) -> None:
        named = {word for text in KEYS.values() for word in text.replace(",", "").split()}
        assert named - {"and"} <= keys_by_name().keys()


class TestFile:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"learner\.deepspeed: no such file .*no\.json"):
            deepspeed_config(LearnerConfig(deepspeed=str(tmp_path / "no.json")))

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
            deepspeed_config(LearnerConfig(deepspeed=str(tmp_path)))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b'{\n  "bf16": {\n}', "ds.json:3:2: not valid JSON: Expecting"),
            (b'{\n  // no\n  "a": 1}', "ds.json:2:3: not valid JSON"),
            (b"", "ds.json:1:1: not valid JSON"),
            (b"[1]", "must hold a JSON object (got [1])"),
            (b'"auto"', 'must hold a JSON object (got "auto")'),
            (b'{"a": 1, "a": 2}', "ds.json: a: repeated key"),
            (b'{"a": "\xff"}', "not UTF-8"),
            (b"[" * 100_000, "nested too deeply"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_no_json_object(self, merge: Merge, text: bytes, words: str) -> None:
        assert words in only_problem(merge, text)

    def test_a_byte_order_mark_is_no_problem(self, merge: Merge) -> None:
        assert merge(b"\xef\xbb\xbf{}") == deepspeed_config(LearnerConfig())
