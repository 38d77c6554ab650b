"""What a trainer says of itself, as it comes out of a container that anything may run in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import heard, make_report
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.core.values.trainer_report import (
    RankReport,
    SnapshotProblem,
    read_status,
    read_termination,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
WIRE_NAMES = (
    *("uid", "attempt", "time", "phase", "phaseSeconds", "seconds", "epoch", "step", "totalSteps", "loss", "metrics"),
    *("samplesPerSecond", "etaSeconds", "resumedFromStep", "snapshot", "snapshotProblem", "snapshotsSetAside", "ranks"),
    *("reason", "message", "rank", "signal", "exception", "traceback"),
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("Traceback (most recent call last):", id="a traceback"),
        pytest.param('{"version": 1', id="half an object"),
        pytest.param("[" * 100_000, id="100,000 brackets"),
        pytest.param('{"version": 1, "step": 1' + "0" * 5000 + "}", id="a number of 5,000 digits"),
        pytest.param("7", id="a number"),
        pytest.param('{"version": 2}', id="a version that is not known"),
        pytest.param(b"\xff\xfe", id="no text"),
    ],
)
def test_what_is_no_report_is_none(text: Any) -> None:
    assert read_status(text) is None
    assert isinstance(text, bytes) or read_termination(text) is None


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, True, 10**400, float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("field", ["step", "loss", "etaSeconds", "attempt", "snapshot"])
def test_a_field_of_another_type_or_no_number_is_unknown(field: str, value: Any) -> None:
    assert heard(**{field: value}) == heard(**{field: None})


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [(7, 7, 7.0), (0, 0, 0.0), (-1, None, -1.0), (7.5, None, 7.5), (2**63, None, float(2**63)), (True, None, None)],
)
def test_a_number_is_such_as_a_status_can_carry(value: Any, whole: int | None, number: float | None) -> None:
    report = heard(step=value, loss=value)
    assert (report.step, report.loss) == (whole, number)


@pytest.mark.parametrize("field", ["phaseSeconds", "etaSeconds", "stopSeconds", "shutdownSeconds"])
@pytest.mark.parametrize("value", [-1, 1e306, 10**10])
def test_a_duration_that_no_run_has_is_unknown(field: str, value: float) -> None:
    assert heard(**{field: value}) == heard()
    assert heard(seconds={"train": value}).seconds == {}


def test_numbers_by_name_lose_those_that_are_none() -> None:
    report = heard(metrics={"good": 1, "bad": "x", "nan": float("nan"), "two\nlines": 1, "x" * 80: 2})
    assert report.metrics == {"good": 1.0, "x" * 64: 2.0}
    assert heard(seconds={"train": 2, "save": -1}).seconds == {"train": 2.0}


def test_lists_lose_what_is_no_item() -> None:
    report = heard(
        ranks=[{"rank": 0, "pid": 7, "step": 3}, {"rank": None}, 4, {"rank": 1, "pid": "x"}],
        snapshotsSetAside=[{"step": 80, "message": "SHA-256 differs"}, {"step": 90}, "x"],
    )
    assert report.ranks == (RankReport(0, 7, 3), RankReport(1))
    assert report.snapshots_set_aside == ("SHA-256 differs",)


def test_lists_and_texts_are_bounded() -> None:
    report = heard(
        metrics={str(number): number for number in range(1000)},
        snapshotsSetAside=[{"message": "x" * 10_000}] * 1000,
        snapshotProblem={"failures": 3, "message": "x" * 10_000},
    )
    assert (len(report.metrics), len(report.snapshots_set_aside)) == (64, 64)
    assert report.snapshot_problem == SnapshotProblem(3, "x" * 4096)


def test_half_a_surrogate_becomes_a_character_that_a_status_can_carry() -> None:
    report = read_termination(r'{"version": 1, "message": "\ud800 x"}')
    assert report is not None
    assert report.message.encode()


@pytest.mark.parametrize(
    ("said", "reason", "signal"),
    [
        ({"reason": "WorkerKilled", "signal": "SIGKILL"}, "WorkerKilled", "SIGKILL"),
        ({"reason": "two words", "signal": "it hurt"}, "Failed", ""),
        ({"reason": ["x"], "signal": 9}, "Failed", ""),
    ],
)
def test_reason_and_signal_are_one_word(said: dict[str, Any], reason: str, signal: str) -> None:
    report = read_termination(make_report(**said))
    assert report is not None
    assert (report.reason, report.signal) == (reason, signal)


@given(st.dictionaries(st.sampled_from(WIRE_NAMES), values) | values, st.sampled_from((1, 2)))
def test_no_answer_makes_the_reader_fail(said: Any, version: int) -> None:
    text = json.dumps(said | {"version": version} if isinstance(said, dict) else said)
    assert (read_status(text) is None) is (read_termination(text) is None)
