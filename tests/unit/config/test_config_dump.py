"""A dumped config reads back equal, from a file and from flags."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Annotated, Any, get_args

import annotated_types
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from real_ray.config import Config, dump_config, load_config
from real_ray.config.flags import Key, describe_keys

_BOUNDS = (
    annotated_types.Gt,
    annotated_types.Ge,
    annotated_types.Lt,
    annotated_types.Le,
    annotated_types.MinLen,
)
_TRAPS = (
    *(
        "7",
        "on",
        "no",
        "true",
        "null",
        "~",
        "2e-6",
        "1_000",
        "010",
        "1:30",
        "2026-01-01",
        "=",
        "<<",
    ),
    *("- a", "a: b", "# a", " a ", "\n", "\t", "\r\n", "\x85", "\u2028", "\ufeff", "\x00", "'\"\\"),
)


def values_of(key: Key) -> st.SearchStrategy[Any]:
    section = Config.model_fields[key.section].annotation
    info = section.model_fields[key.field]  # type: ignore[union-attr]
    if key.name == "run.name":
        return st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
    bounds = tuple(bound for bound in info.metadata if isinstance(bound, _BOUNDS))
    kind = info.annotation if not key.nullable else get_args(info.annotation)[0]
    values = st.from_type(Annotated[(kind, *bounds)] if bounds else kind)
    if key.kind == "string" and not key.choices:
        values |= st.sampled_from(_TRAPS)
        values = values.filter(lambda text: text == "~" or not text.startswith("~"))
        values = values.filter(bool) if key.bound == "not empty" else values
    if key.kind == "number":
        values = values.filter(math.isfinite)
    return st.none() | values if key.nullable else values


def keep_the_rules(values: dict[str, dict[str, Any]]) -> None:
    """Rules over several keys have nothing to do with reading and writing."""
    data, rollout = values["data"], values["rollout"]
    learner, loss = values["learner"], values["loss"]
    data.setdefault("eval", "arithmetic")
    if data["eval"] is None:
        values["eval"].pop("every", None)
    rollout |= {"allow_truncated_sampling": True, "max_model_length": None}
    rollout["num_generators"] = max(
        rollout.get("num_generators", 1), rollout.get("min_generators") or 1
    )
    if rollout.get("max_generators") is not None:
        rollout["max_generators"] = max(rollout["max_generators"], rollout["num_generators"])
    learner["prompts_per_step"] = 3 * learner.get("minibatches_per_batch", 1)
    longest = data.get("max_prompt_length", 1024) + rollout.get("max_completion_length", 512)
    learner["max_tokens_per_microbatch"] = longest
    if learner.get("lora_sync") == "adapter":
        learner["lora_rank"] = 8
    learner.setdefault("share_prefix", False)
    learner["packing"] = learner["share_prefix"] or learner.get("packing", True)
    if learner.get("offload_optimizer") or learner.get("offload_params"):
        learner["zero_stage"] = 3
    if loss.keys() & {"epsilon", "epsilon_high"}:
        loss["type"] = "dapo"
    if rollout.get("oversample") is not None:
        rollout["max_staleness"] = 8


@st.composite
def configs(draw: st.DrawFn) -> Config:
    names = draw(st.sets(st.sampled_from([key.name for key in describe_keys()]), max_size=12))
    names |= {"model.name_or_path", "data.train"}
    values: dict[str, dict[str, Any]] = {section: {} for section in Config.model_fields}
    for key in describe_keys():
        if key.name in names:
            values[key.section][key.field] = draw(values_of(key))
    keep_the_rules(values)
    return Config.model_validate(values)


@pytest.mark.parametrize("text", _TRAPS)
def test_text_that_yaml_could_misread(text: str, tmp_path: Path) -> None:
    config = load_config(None, {"model.name_or_path": "m", "data.train": text})
    path = tmp_path / "config.yaml"
    path.write_bytes(dump_config(config).encode())
    assert load_config(path).data.train == text


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value).removesuffix("\n...\n")


@settings(max_examples=50, deadline=None)
@given(configs())
def test_dump_reads_back_equal(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(dump_config(config).encode())
        assert load_config(path) == config


@settings(max_examples=50, deadline=None)
@given(configs())
def test_flags_read_back_equal(config: Config) -> None:
    flags = {
        f"{section}.{field}": value if isinstance(value, str) else as_yaml(value)
        for section, fields in config.model_dump().items()
        for field, value in fields.items()
    }
    for key in describe_keys():
        if key.nullable and key.kind == "string":
            text = getattr(getattr(config, key.section), key.field)
            assume(text not in ("null", "~"))  # what means null in a flag
    assert load_config(None, flags) == config


_NEW_VALUES = {"integer": "7", "number": "0.25", "string": "some/path"}
_OTHER_VALUES = {"rollout.oversample": "1.25", "rollout.min_generators": "1"}


@pytest.mark.parametrize("key", [k for k in describe_keys() if k.nullable], ids=lambda k: k.name)
def test_nullable_keys_take_a_value_and_null(key: Key, tmp_path: Path) -> None:
    required = {"model.name_or_path": "m", "data.train": "t", "data.eval": "t", "loss.type": "dapo"}
    required |= {"data.max_prompt_length": "1", "rollout.max_completion_length": "1"}
    path, value = tmp_path / "config.yaml", _OTHER_VALUES.get(key.name, _NEW_VALUES[key.kind])
    path.write_text(dump_config(load_config(None, required | {key.name: value})))
    section = getattr(load_config(path), key.section)
    assert str(getattr(section, key.field)) == value
    section = getattr(load_config(path, {key.name: "null"}), key.section)
    assert getattr(section, key.field) is None


@pytest.mark.parametrize("name", [k.name for k in describe_keys() if k.kind == "array"])
def test_lists_of_a_flag_and_of_a_file(name: str, tmp_path: Path) -> None:
    required = {"model.name_or_path": "m", "data.train": "t"}
    config = load_config(None, required | {name: "[q_proj, '7', on]"})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    section, _, field = name.partition(".")
    for loaded in (config, load_config(path)):
        assert getattr(getattr(loaded, section), field) == ["q_proj", "7", "on"]


def test_dump_has_all_keys_in_order_and_any_yaml_reads_it() -> None:
    config = load_config(None, {"model.name_or_path": "on", "data.train": "2e-6"})
    text = dump_config(config)
    values = yaml.safe_load(text)
    assert values == config.model_dump()
    names = [f"{section}.{field}" for section in values for field in values[section]]
    assert names == [key.name for key in describe_keys()]
    assert "name_or_path: 'on'" in text
