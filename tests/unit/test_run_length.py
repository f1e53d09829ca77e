"""How many steps a run has."""

from __future__ import annotations

import pytest
from fakes import make_config

from real_ray.errors import ConfigError
from real_ray.run_length import with_num_steps


@pytest.mark.parametrize(
    ("run", "drop_last", "num_prompts", "expected"),
    [
        ({}, False, 10, 4),  # one epoch of steps of 3, the last one of 1
        ({}, True, 10, 3),
        ({"num_epochs": 2}, False, 10, 7),
        ({"num_epochs": 2}, True, 10, 6),
        ({"num_epochs": 2, "num_steps": 5}, False, 10, 5),
        ({"num_epochs": 2, "num_steps": 50}, False, 10, 7),
        ({"num_steps": 50}, False, 10, 50),  # endless: epoch after epoch
        ({"num_steps": 50}, True, 1, 50),
        ({}, False, 2, 1),  # a dataset smaller than a step
    ],
)
def test_steps_follow_from_data_and_epochs(
    run: dict[str, object], drop_last: bool, num_prompts: int, expected: int
) -> None:
    config = make_config(run={"num_steps": None, **run}, data={"drop_last": drop_last})
    counted = with_num_steps(config, num_prompts=num_prompts)
    assert counted.num_steps == expected
    assert counted.num_epochs == config.num_epochs
    assert with_num_steps(counted, num_prompts=num_prompts) == counted


def test_too_few_prompts_for_one_step_are_refused_with_both_numbers() -> None:
    config = make_config(run={"num_steps": None}, data={"drop_last": True})
    with pytest.raises(ConfigError, match=r"data.train has 2 prompts.*prompts_per_step = 3"):
        with_num_steps(config, num_prompts=2)
