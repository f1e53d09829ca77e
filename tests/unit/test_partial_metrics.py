from __future__ import annotations

import pickle

from real_ray.partial_metrics import PartialMetrics

A = PartialMetrics(
    totals={"loss": 1.0}, means={"m": (3.0, 2)}, minima={"lo": 1.0}, maxima={"hi": 1.0}
)
B = PartialMetrics(
    totals={"loss": 0.5}, means={"m": (1.0, 6)}, minima={"lo": -1.0}, maxima={"hi": 4.0}
)


def test_means_are_weighted_by_their_counts() -> None:
    assert PartialMetrics.merge([A, B]).values() == {"loss": 1.5, "m": 0.5, "lo": -1.0, "hi": 4.0}


def test_merging_in_any_grouping_gives_the_same() -> None:
    merge = PartialMetrics.merge
    assert merge([merge([A]), merge([]), merge([B, A])]) == merge([A, A, B])


def test_without_members_there_is_no_key() -> None:
    empty = PartialMetrics(
        means={"m": (0.0, 0)}, minima={"lo": float("inf")}, maxima={"hi": float("-inf")}
    )
    assert empty.values() == {}
    assert PartialMetrics.merge([empty, A]) == A
    assert PartialMetrics.merge([]).values() == {}


def test_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(A)) == A
