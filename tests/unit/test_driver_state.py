"""What a checkpoint keeps of the driver, as text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes import rollout_ticket

from real_ray.checkpoint import BufferedGroup, DriverState, from_json, to_json
from real_ray.errors import CheckpointError
from real_ray.ledger import LedgerState
from real_ray.types import Sampling

STATE = DriverState(
    policy_version=40,
    prompts="0123456789abcdef",
    prompts_per_step=3,
    sampling=Sampling(n=2, temperature=0.6, max_tokens=8, stop=("\n\n",)),
    reward_function="rewards:f",
    ledger=LedgerState(closed_below=120, closed=(122, 125), outcomes={"trained": 120, "failed": 2}),
    num_resampled=1,
    buffered=(
        BufferedGroup(number=120, accepted=True, group=rollout_ticket("p:20@1")),
        BufferedGroup(number=123, accepted=False, group=rollout_ticket("p:2@1", oldest=39)),
    ),
)


def test_it_comes_back_equal_and_without_references() -> None:
    sampled = replace(STATE.buffered[0].group.sampled, ref=object())
    group = replace(STATE.buffered[0].group, sampled=sampled, ref=object())
    with_refs = replace(
        STATE, buffered=(replace(STATE.buffered[0], group=group), STATE.buffered[1])
    )
    assert from_json(to_json(with_refs), place="driver.json") == STATE


@pytest.mark.parametrize("text", ["", "{", "[]", '{"policy_version": 1}'])
def test_anything_else_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^runs/a/driver.json: not the driver's state"):
        from_json(text, place="runs/a/driver.json")


def test_a_wrong_value_is_named() -> None:
    content = json.loads(to_json(STATE)) | {"num_resampled": "many"}
    with pytest.raises(CheckpointError, match="num_resampled"):
        from_json(json.dumps(content), place="driver.json")
