"""Distributions of times, as users write them."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import fmean, median

import pytest

from real_ray.errors import ConfigError
from real_ray.simulate import parse_distribution
from real_ray.simulate.distributions import measured


def draws(text: str, count: int = 20_000) -> list[float]:
    seconds = parse_distribution(text, option="--generate").draws(Random(0))
    return list(islice(seconds, count))


@pytest.mark.parametrize("text", ["constant:4", "4", "4.0", "constant: 4"])
def test_constant(text: str) -> None:
    assert set(draws(text, 5)) == {4.0}
    assert parse_distribution(text, option="--train").mean == 4


def test_lognormal_has_its_median_and_mean() -> None:
    values = draws("lognormal:4,0.5")
    assert median(values) == pytest.approx(4, rel=0.02)
    mean = parse_distribution("lognormal:4,0.5", option="--generate").mean
    assert fmean(values) == pytest.approx(mean, rel=0.02)
    assert mean == pytest.approx(4.5326, rel=1e-3)


def test_pareto_has_its_minimum_and_a_heavy_tail() -> None:
    values = draws("pareto:2,3")
    assert 2 <= min(values) < 2.001
    assert fmean(values) == pytest.approx(3, rel=0.03)
    assert parse_distribution("pareto:2,3", option="--generate").mean == pytest.approx(3)
    # One in 1000 exceeds minimum * 1000 ** (1 / alpha).
    assert sum(value > 20 for value in values) / len(values) == pytest.approx(0.001, abs=0.001)


def test_what_was_measured_comes_in_its_order_over_and_over() -> None:
    distribution = measured([6.0, 1.0, 2.0])
    assert distribution.mean == 3
    assert list(islice(distribution.draws(Random(0)), 7)) == [6, 1, 2, 6, 1, 2, 6]
    pairs = measured([6.0, 1.0], in_a_row=2)
    assert list(islice(pairs.draws(Random(0)), 6)) == [6, 6, 1, 1, 6, 6]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("normal:4,1", "is no distribution"),
        ("constant:", "is no distribution"),
        ("constant:1,2", "is no distribution"),
        ("lognormal:4", "is no distribution"),
        ("pareto:2,x", "is no distribution"),
        ("", "is no distribution"),
        ("constant:-1", "SECONDS is at least 0"),
        ("constant:nan", "SECONDS is at least 0"),
        ("constant:inf", "SECONDS is at least 0"),
        ("lognormal:0,1", "MEDIAN is above 0"),
        ("lognormal:1,9", "SIGMA is 0 to 5"),
        ("pareto:0,2", "MINIMUM is above 0"),
        ("pareto:1,1", "ALPHA is above 1"),
    ],
)
def test_anything_else_is_refused_with_the_forms(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_distribution(text, option="--sync")
    message = str(raised.value)
    assert message.startswith(f"--sync: {text!r}")
    assert problem in message
    assert "lognormal:MEDIAN,SIGMA" in message
