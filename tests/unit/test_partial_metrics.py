from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_an_average_of_batches_averages_totals_and_keeps_counts_and_extremes() -> None:
    average = PartialMetrics.average([A, B])
    assert average == PartialMetrics(
        totals={"loss": 0.75}, means={"m": (4.0, 8)}, minima={"lo": -1.0}, maxima={"hi": 4.0}
    )
    assert PartialMetrics.average([A]) == A
    assert PartialMetrics.average([A, A, A]).values() == A.values()


def test_a_total_that_a_batch_lacks_counts_as_nothing_there() -> None:
    assert PartialMetrics.average([A, PartialMetrics()]).totals == {"loss": 0.5}


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=1, max_size=5))
def test_batches_in_parts_average_as_whole_batches_do(batches: list[list[float]]) -> None:
    """Each rank averages its own parts of the batches; then the ranks are merged."""

    def part(values: list[float]) -> PartialMetrics:
        return PartialMetrics(
            totals={"loss": sum(values)},
            means={"m": (sum(values), len(values))},
            maxima={"hi": max(values)},
        )

    whole = PartialMetrics.average([part(batch) for batch in batches])
    ranks = [PartialMetrics.average([part([b[rank]]) for b in batches]) for rank in range(2)]
    assert PartialMetrics.merge(ranks).values() == pytest.approx(whole.values(), abs=1e-9)


def test_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(A)) == A
