"""Flags of the command line."""

from __future__ import annotations

import pytest

from real_ray.config.flags import split_arguments, split_flags
from real_ray.errors import ConfigError


def problems(*args: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        split_flags(args)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        (["--loss.tau", "0.3"], [("loss.tau", "0.3")]),
        (["--loss.tau=0.3"], [("loss.tau", "0.3")]),
        (["--loss.positive_above", "-1"], [("loss.positive_above", "-1")]),
        (["--run.name", "7", "--run.name=a=b"], [("run.name", "7"), ("run.name", "a=b")]),
        (["--data.system_prompt="], [("data.system_prompt", "")]),
        (["--data.system_prompt=--x"], [("data.system_prompt", "--x")]),
        (["--rollout.stop", "[a, b]"], [("rollout.stop", "[a, b]")]),
        (["--run.overwrite"], [("run.overwrite", "true")]),
        (["--run.overwrite", "false"], [("run.overwrite", "false")]),
        (["--run.overwrite", "no"], [("run.overwrite", "no")]),
        (["--run.overwrite=maybe"], [("run.overwrite", "maybe")]),
        (["--run.overwrite", "--loss.tau", "1"], [("run.overwrite", "true"), ("loss.tau", "1")]),
        ([], []),
    ],
)
def test_flags(args: list[str], flags: list[tuple[str, str]]) -> None:
    assert split_flags(args) == flags


def test_a_bare_boolean_leaves_the_next_argument_alone() -> None:
    assert split_arguments(["--run.overwrite", "run.yaml", "--loss.tau", "1"]) == (
        ["run.yaml"],
        [("run.overwrite", "true"), ("loss.tau", "1")],
    )


def test_leftovers_are_refused() -> None:
    assert problems("x", "--loss.tau", "1", "-y") == [
        "x: unexpected argument. Write flags as --section.key VALUE",
        "-y: unexpected argument. Write flags as --section.key VALUE",
    ]


def test_unknown_flags_are_refused_with_the_nearest_name() -> None:
    assert problems("--loss.tua", "1", "--learner.learning-rat=1", "--lr", "--debug=1") == [
        "--loss.tua: unknown flag. Did you mean `loss.tau`?",
        "--learner.learning-rat: unknown flag. Did you mean `learner.learning_rate`?",
        "--lr: unknown flag. Use `learner.learning_rate`",
        problems("--debug")[0],
    ]


def test_a_value_is_needed() -> None:
    assert problems("--loss.tau", "--run.name") == [
        "--loss.tau: needs a value: a number. Write --loss.tau=VALUE if it starts with --",
        "--run.name: needs a value: text. Write --run.name=VALUE if it starts with --",
    ]
