"""What is wrong with the weights of a generator, in words."""

from __future__ import annotations

import pytest

from real_ray.weights import HeldWeights, SentWeights, most_common, what_is_wrong

SENT = SentWeights(policy_version=3, num_tensors=2, num_bytes=48, checksums={"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("held", "wrong"),
    [
        (HeldWeights(policy_version=3, num_tensors=2, checksums={"a": 1, "b": 2}), ""),
        (HeldWeights(policy_version=3, num_tensors=2), ""),  # a back end without checksums
        (HeldWeights(policy_version=2, num_tensors=2), "version 2"),
        (HeldWeights(policy_version=3, num_tensors=1), "1 tensors of 2"),
        (
            HeldWeights(policy_version=3, num_tensors=2, checksums={"a": 1, "b": 9}),
            "not as sent: b",
        ),
        (HeldWeights(policy_version=3, num_tensors=2, checksums={"a": 1}), "missing: b"),
        (
            HeldWeights(policy_version=3, num_tensors=2, checksums={"a": 1, "b": 2, "c": 3}),
            "not sent: c",
        ),
        (
            HeldWeights(policy_version=2, num_tensors=2, problems=("not loaded: x",)),
            "not loaded: x; version 2",
        ),
    ],
)
def test_each_difference_is_named(held: HeldWeights, wrong: str) -> None:
    assert what_is_wrong(SENT, held) == wrong


def test_of_many_tensors_some_are_named() -> None:
    names = [f"t{i}" for i in range(9)]
    sent = SentWeights(
        policy_version=1, num_tensors=9, num_bytes=9, checksums=dict.fromkeys(names, 0)
    )
    held = HeldWeights(policy_version=1, num_tensors=9, checksums=dict.fromkeys(names, 1))
    assert what_is_wrong(sent, held) == "not as sent: t0, t1, t2 ..."


@pytest.mark.parametrize(
    ("checksums", "expected"),
    [("", ""), ("a", "a"), ("aba", "a"), ("ab", ""), ("aabb", ""), ("abc", ""), ("bbbaa", "b")],
)
def test_the_checksum_of_more_than_half(checksums: str, expected: str) -> None:
    assert most_common(list(checksums)) == expected
