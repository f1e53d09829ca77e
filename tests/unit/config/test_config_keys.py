"""The description of the keys, and the hints that lead to them."""

from __future__ import annotations

import pytest

import real_ray.config
from real_ray.config import Config
from real_ray.config.flags import Key, describe_keys
from real_ray.config.hints import FOREIGN, REFUSED, SHORTHANDS, advise
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
        ("loss.type", "text", "real", "only real"),
        ("cluster.device", "text", "auto", "one of auto, cpu, cuda"),
        ("data.train", "text", None, "not empty"),
        ("data.eval", "text or null", "null", ""),
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


def test_names_with_several_homes() -> None:
    advice = advise("eval.timeout_s")
    assert "belongs to `rollout` or `reward` or `learner` or `sync`" in advice
    assert "`sync.timeout_s`" in advice
