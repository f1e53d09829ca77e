"""What follows from the keys of a config, and in which two configs differ."""

from __future__ import annotations

from fakes import make_config

from real_ray.config import changed_settings


def test_slots_are_whole_multiples_of_a_batch_whatever_floats_make_of_them() -> None:
    assert 4.1 * 30 < 123  # in floats
    config = make_config(
        rollout={"oversample": 4.1, "max_staleness": 4}, learner={"prompts_per_step": 30}
    )
    assert config.num_slots == 123
    assert make_config(rollout={"max_staleness": 2}).num_slots == 9


def test_settings_that_change_the_result_are_told_and_others_are_not() -> None:
    before = make_config(loss={"tau": 0.5}, data={"eval": "arithmetic"})
    after = make_config(
        loss={"tau": 0.3},
        run={"num_steps": 9, "seed": 1, "name": "other", "output_dir": "elsewhere"},
        data={"eval": None},
        tracking={"samples": False},
        cluster={"num_cpus": 3},
        checkpoint={"save_steps": 5},
    )
    assert changed_settings(before, after) == [
        "run.seed 0 -> 1",
        "data.eval arithmetic -> null",
        "loss.tau 0.5 -> 0.3",
    ]
    assert changed_settings(after, after) == []
