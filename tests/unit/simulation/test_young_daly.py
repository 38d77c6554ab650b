"""The closed forms: limits that are known, and the optimum where the curve has it."""

from __future__ import annotations

import math

import pytest
from tests.simulation.young_daly import daly_interval, goodput, wall_time, young_goodput, young_interval

MTBF, STALL, RECOVERY = 10_000.0, 5.0, 400.0


def test_without_failures_only_the_stalls_are_lost() -> None:
    assert goodput(1e12, 95.0, 5.0, 400.0) == pytest.approx(0.95)


def test_young_is_daly_to_first_order() -> None:
    rare = 1e7
    daly, young = goodput(rare, 300.0, STALL, RECOVERY), young_goodput(rare, 300.0, STALL, RECOVERY)
    assert daly == pytest.approx(young, abs=1e-5)


def test_wall_time_is_that_of_the_formula() -> None:
    expected = MTBF * math.exp(0.04) * (math.exp(0.0305) - 1) * 3000 / 300
    assert wall_time(3000.0, MTBF, 300.0, STALL, RECOVERY) == pytest.approx(expected)


def test_the_best_interval_of_daly_is_where_his_curve_is_highest() -> None:
    best = max(range(50, 2000), key=lambda interval: goodput(MTBF, interval, STALL, RECOVERY))
    assert daly_interval(MTBF, STALL) == pytest.approx(best, abs=1.0)
    assert young_interval(MTBF, STALL) == pytest.approx(best, rel=0.03)
