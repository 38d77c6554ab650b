"""Histograms in a heartbeat, as a scrape shows them: how many durations came to lie below each bound, and their sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

# fmt: off
BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)
# fmt: on
"""Upper bounds, in seconds, of a duration histogram."""
RECOVERY_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The same of a live recovery: a rank that was killed takes less than one, one that stands still more than three."""


def nothing_observed(bounds: Sequence[float] = BUCKETS) -> dict[str, Any]:
    """Counts below each of `bounds` (not cumulative; the last is +Inf) and the sum of what was observed."""
    return {"counts": [0] * (len(bounds) + 1), "sum": 0.0}


def observe(histogram: dict[str, Any], value: float, bounds: Sequence[float] = BUCKETS) -> None:
    """Count a value of the unit of `bounds`, those that the histogram was made with."""
    histogram["counts"][bisect_left(bounds, value)] += 1
    histogram["sum"] += value
