"""How long each tier took, for the end of a run."""

from __future__ import annotations

from collections import defaultdict

import pytest


class Durations:
    """Test functions with their setup and teardown, by the folder below tests/. Workers side by side add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = report.nodeid.split("/", 2)[1]
        self._seconds[tier] += report.duration
        self._tests[tier].add(report.nodeid)

    def lines(self) -> list[str]:
        """One a tier, the longest first; none where a single tier ran."""
        if len(self._seconds) < 2:
            return []
        tiers = sorted(self._seconds, key=lambda tier: -self._seconds[tier])
        return [f"{tier:<12} {len(self._tests[tier]):>5} tests {self._seconds[tier]:>8.1f} s" for tier in tiers]
