"""Groups on disk: what was written is read again, and damage is noticed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_states import assert_same_group
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from actors.buffered_groups import read_group, write_groups
from real_ray.errors import CheckpointError
from real_ray.types import Completion, Prompt, RolloutGroup, SampledGroup, VersionSpan

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates, too
TOKENS = st.integers(0, 2**31 - 1)


def floats(length: int) -> Any:
    return arrays(np.float32, length, elements=st.floats(width=32))


@st.composite
def completion(draw: st.DrawFn, index: int) -> Completion:
    length = draw(st.integers(0, 6))
    cut = draw(st.integers(0, length))
    return Completion(
        index=index,
        token_ids=draw(arrays(np.int32, length, elements=TOKENS)),
        generator_logprobs=draw(floats(length)),
        spans=(
            VersionSpan(version=draw(st.integers(0, 9)), start=0, end=cut),
            VersionSpan(version=10, start=cut, end=length),
        ),
        text=draw(TEXT),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )


@st.composite
def rollout_group(draw: st.DrawFn) -> RolloutGroup:
    size = draw(st.integers(1, 3))
    prompt = Prompt(
        uid=draw(TEXT),
        text=draw(TEXT),
        token_ids=draw(arrays(np.int32, st.integers(0, 5), elements=TOKENS)),
        answer=draw(TEXT),
        columns={"solution": object()},
    )
    return RolloutGroup(
        sampled=SampledGroup(
            prompt=prompt,
            num_generations=size,
            completions=tuple(draw(completion(index)) for index in range(size)),
        ),
        rewards=draw(floats(size)),
    )


@given(groups=st.lists(rollout_group(), min_size=1, max_size=3))
def test_groups_are_the_same_to_the_bit(groups: list[RolloutGroup]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_groups(directory, dict(enumerate(groups, start=7)))
        for number, group in enumerate(groups, start=7):
            got = read_group(directory / "groups" / f"{number}.safetensors")
            assert_same_group(got, group)


def a_file(directory: Path) -> Path:
    one = np.ones(1, dtype=np.int32)
    member = Completion(
        index=0,
        token_ids=one,
        generator_logprobs=-np.ones(1, dtype=np.float32),
        spans=(VersionSpan(version=0, start=0, end=1),),
        text="",
        finish_reason="stop",
    )
    prompt = Prompt(uid="a", text="", token_ids=one, answer="")
    group = RolloutGroup(
        sampled=SampledGroup(prompt=prompt, num_generations=1, completions=(member,)),
        rewards=np.ones(1, dtype=np.float32),
    )
    write_groups(directory, {3: group})
    return directory / "groups" / "3.safetensors"


def without(name: bytes, content: bytes) -> bytes:
    """The content with another name for a tensor, or a text, of the same length."""
    assert content.count(name) == 1
    return content.replace(name, name[::-1])


@pytest.mark.parametrize(
    "content",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"x" * len(content),
        lambda content: without(b'"rewards"', content),
        lambda content: without(b'\\"completions\\"', content),
        lambda content: without(b'"token_ids.0"', content),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: Any) -> None:
    file = a_file(tmp_path)
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"3\.safetensors: .* Use an earlier checkpoint"):
        read_group(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"3\.safetensors: .* Use an earlier checkpoint"):
        read_group(tmp_path / "3.safetensors")
