"""Which rank the others wait for, as far as it is measured."""

from __future__ import annotations

import pytest

from ddpjob_operator.core.ledger.ranks import (
    PodThrottling,
    RankRow,
    data_wait_of,
    milliseconds,
    slowest_first,
    slowest_of,
    throttled,
)
from ddpjob_operator.core.values.trainer_report import Throttling, read_throttling


def ranks(
    steps: list[float | None], waits: list[float | None] | None = None, passes: list[float | None] | None = None
) -> list[RankRow]:
    unknown = [None] * len(steps)
    return [
        RankRow(rank, step_seconds=step, data_seconds=wait, passes_seconds=took)
        for rank, (step, wait, took) in enumerate(zip(steps, waits or unknown, passes or unknown, strict=True))
    ]


@pytest.mark.parametrize(
    ("steps", "waits", "slowest"),
    [
        pytest.param([0.1, 0.1, 0.14, 0.1], None, 2, id="its steps are longer"),
        pytest.param([0.1, 0.1, 0.105, 0.1], None, None, id="hardly longer"),
        pytest.param([0.1] * 4, [0.001, 0.05, 0.001, 0.002], 1, id="all wait for the one whose data comes late"),
        pytest.param([0.1] * 4, [0.05] * 4, None, id="the data of all comes late"),
        pytest.param([0.1], [0.05], None, id="a single rank"),
        pytest.param([None, None], None, None, id="nothing is known"),
        pytest.param([0.0, 0.0], None, None, id="steps of no time"),
    ],
)
def test_the_rank_that_the_others_wait_for(
    steps: list[float | None], waits: list[float | None] | None, slowest: int | None
) -> None:
    found = slowest_of(ranks(steps, waits))
    assert (found.rank if found else None) == slowest


@pytest.mark.parametrize(
    ("waits", "passes", "slowest", "reason"),
    [
        pytest.param(
            None, [0.01, 0.08, 0.011, 0.012], 1,
            "its own forward and backward passes take 80 ms, those of the median rank 11 ms",
            id="its own work is slow, and the steps of all are as long",
        ),
        pytest.param(None, [0.05, 0.058, 0.05, 0.05], None, "", id="hardly longer"),
        pytest.param(None, [0.01, 0.029, 0.01, 0.01], None, "", id="three times as long, but little of a step"),
        pytest.param(None, [0.08, None, None, None], None, "", id="no other to compare with"),
        pytest.param(
            [0.0, 0.0, 0.06, 0.0], [0.01, 0.04, 0.01, 0.01], 2, "it waits 60 ms longer for the data",
            id="the data of one costs more than the passes of another",
        ),
    ],
)  # fmt: skip
def test_ranks_that_meet_in_each_step_differ_in_what_they_do_themselves(
    waits: list[float | None] | None, passes: list[float | None], slowest: int | None, reason: str
) -> None:
    found = slowest_of(ranks([0.1, 0.1, 0.1, 0.1], waits, passes))
    assert (found.rank if found else None) == slowest
    assert found is None or found.reason.startswith(reason)
    assert found is None or found.waits_for_data == ("waits" in reason)


def test_of_two_ranks_the_slow_one_is_compared_with_the_other() -> None:
    found = slowest_of(ranks([0.1, 0.15]))
    assert found is not None
    assert (found.rank, found.reason) == (1, "its steps take 1.5 times the median of all ranks")


@pytest.mark.parametrize(
    ("waits", "found"),
    [([0.02, 0.03, 0.04], (0.03, 0.1)), ([0.0, 0.001, 0.09], None), ([None, None, None], None)],
)
def test_data_that_the_median_rank_waits_for_is_noticed(
    waits: list[float | None], found: tuple[float, float] | None
) -> None:
    assert data_wait_of(ranks([0.1, 0.1, 0.1], waits)) == found


def test_the_slowest_comes_first_and_then_those_with_long_steps() -> None:
    found = slowest_first(ranks([0.1, 0.105, 0.1, None], [0.0, 0.0, 0.05, None]))
    assert [rank.rank for rank in found] == [2, 1, 0, 3]


def test_pods_that_their_cpu_limit_stops_often_are_named_the_worst_first() -> None:
    given = (("a", 59), ("b", 60), ("c", 300))
    pods = [PodThrottling(name, "", Throttling(60.0, 600, periods, 1.0)) for name, periods in given]
    assert [(pod.pod, pod.share) for pod in throttled(pods)] == [("c", 0.5), ("b", 0.1)]


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        {},
        {"seconds": 60, "periods": 0, "throttledPeriods": 0, "throttledSeconds": 0},
        {"seconds": 60, "periods": 5, "throttledPeriods": 6, "throttledSeconds": 1},
        {"seconds": -1, "periods": 5, "throttledPeriods": 1, "throttledSeconds": 1},
    ],
)
def test_what_is_no_account_of_a_limit_is_none(given: object) -> None:
    assert read_throttling(given) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (1.25, "1.25 s"),
        (0.25, "250 ms"),
        (0.0042, "4.2 ms"),
        (0.0, "0 ms"),
        (0.00004, "0.04 ms"),
        (0.0996, "100 ms"),
        (0.0994, "99 ms"),
        (999.6, "1000 s"),
        (1234.5, "1234 s"),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text
