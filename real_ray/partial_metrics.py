"""Metrics of a part of a batch, in a form that combines exactly over micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialMetrics:
    """Sums, counts and extremes. Plain floats, so that ranks can send them to any process.

    Example: ``PartialMetrics(means={"real/score_pos": (0.3, 2)}, maxima={"real/score_max": 0.2})``
    """

    totals: Mapping[str, float] = field(default_factory=dict)  # shares that add up
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # sum, count
    minima: Mapping[str, float] = field(default_factory=dict)  # +inf: without members
    maxima: Mapping[str, float] = field(default_factory=dict)  # -inf: without members

    @staticmethod
    def merge(parts: Iterable[PartialMetrics]) -> PartialMetrics:
        """Metrics of all parts together; of no parts, no metrics."""
        totals: dict[str, float] = {}
        means: dict[str, tuple[float, float]] = {}
        minima: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for part in parts:
            for name, value in part.totals.items():
                totals[name] = totals.get(name, 0.0) + value
            for name, (total, count) in part.means.items():
                old_total, old_count = means.get(name, (0.0, 0.0))
                means[name] = (old_total + total, old_count + count)
            for name, value in part.minima.items():
                minima[name] = min(minima.get(name, math.inf), value)
            for name, value in part.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), value)
        return PartialMetrics(totals=totals, means=means, minima=minima, maxima=maxima)

    @staticmethod
    def average(batches: Sequence[PartialMetrics]) -> PartialMetrics:
        """Metrics of several batches of equal weight together: totals are averaged."""
        merged = PartialMetrics.merge(batches)
        totals = {name: total / len(batches) for name, total in merged.totals.items()}
        return dataclasses.replace(merged, totals=totals)

    def values(self) -> dict[str, float]:
        """The metrics by name. One without members has no key (rather than NaN or infinity)."""
        return {
            **self.totals,
            **{name: total / count for name, (total, count) in self.means.items() if count},
            **{name: value for name, value in self.minima.items() if value != math.inf},
            **{name: value for name, value in self.maxima.items() if value != -math.inf},
        }
