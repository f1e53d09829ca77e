"""How long things take: distributions that users write as text, or that a run has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from random import Random
from statistics import fmean

from real_ray.errors import ConfigError

_FORMS = (
    "constant:SECONDS, lognormal:MEDIAN,SIGMA (of the logarithm, as lognormal:4,0.5) or "
    "pareto:MINIMUM,ALPHA (a heavy tail for ALPHA near 1, as pareto:2,1.5)"
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations in seconds.

    Example: ``parse_distribution("lognormal:4,0.5", option="--generate").draws(Random(0))``
    """

    text: str
    mean: float
    draws: Callable[[Random], Iterator[float]]  # one after the other, without an end


def constant(seconds: float) -> Distribution:
    """Always the same."""
    return Distribution(f"constant:{seconds:g}", seconds, lambda random: repeat(seconds))


def measured(seconds: Sequence[float], *, in_a_row: int = 1) -> Distribution:
    """Values of a run in their order, over and over, so that a slow time stays slow for all roles.

    Args:
        seconds: at least one value.
        in_a_row: draws that get the same value.
    """
    text = f"{len(seconds)} measured, {min(seconds):.3g} to {max(seconds):.3g}"
    return Distribution(
        text,
        fmean(seconds),
        lambda random: (value for value in cycle(seconds) for _ in range(in_a_row)),
    )


def chances(probability: float, random: Random) -> Iterator[bool]:
    """Whether something happens, without an end."""
    return (random.random() < probability for _ in repeat(None))


def parse_distribution(text: str, *, option: str) -> Distribution:
    """Read ``constant:4`` (or ``4``), ``lognormal:4,0.5`` or ``pareto:2,1.5``.

    Args:
        option: where the text stands, for errors.

    Raises:
        ConfigError: naming the option, the value, its bound and the forms.
    """
    kind, colon, numbers = text.partition(":")
    if not colon:
        kind, numbers = "constant", text
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    match kind.strip(), values:
        case "constant", [seconds]:
            _check(0 <= seconds < math.inf, option, text, "SECONDS is at least 0")
            return constant(seconds)
        case "lognormal", [median, sigma]:
            _check(0 < median < math.inf, option, text, "MEDIAN is above 0")
            _check(0 <= sigma <= 5, option, text, "SIGMA is 0 to 5")
            mu = math.log(median)
            mean = median * math.exp(sigma**2 / 2)
            return _independent(text, mean, lambda random: random.lognormvariate(mu, sigma))
        case "pareto", [minimum, alpha]:
            _check(0 < minimum < math.inf, option, text, "MINIMUM is above 0")
            # At 1 and below there is no mean: the longer the run, the slower.
            _check(1 < alpha < math.inf, option, text, "ALPHA is above 1")
            mean = minimum * alpha / (alpha - 1)
            return _independent(text, mean, lambda random: minimum * random.paretovariate(alpha))
    raise ConfigError(f"{option}: {text!r} is no distribution of times. Write {_FORMS}")


def _independent(text: str, mean: float, draw: Callable[[Random], float]) -> Distribution:
    return Distribution(text, mean, lambda random: (draw(random) for _ in repeat(None)))


def _check(holds: bool, option: str, text: str, bound: str) -> None:
    if not holds:
        raise ConfigError(f"{option}: {text!r}: {bound}. Write {_FORMS}")
