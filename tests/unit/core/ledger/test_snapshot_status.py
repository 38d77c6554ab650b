"""What the status says of snapshots that fail and of those that were set aside."""

from __future__ import annotations

from typing import Any

import pytest
from builders import heard, in_phase, later, make_job, seen
from looks import at

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.ledger.progress import MOST_REMEMBERED, warnings, with_report
from ddpjob_operator.core.values import conditions as cond

HEALTHY = in_phase(Phase.RUNNING)
DISK_FULL = {"step": 110, "result": "failed", "message": "no snapshot of step 110: no space left", "failures": 3}


def after(status: DDPJobStatus, **reported: Any) -> DDPJobStatus:
    report = heard(**{"snapshotProblem": None, "snapshotsSetAside": []} | reported)
    return with_report(at(make_job(status), seen(report=report))).status


FAILING = after(HEALTHY, snapshotProblem=DISK_FULL)


def test_three_saves_that_fail_in_a_row_are_a_condition_and_an_event() -> None:
    condition = cond.find(FAILING.conditions, cond.SNAPSHOTS_FAILING)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", "SavesFail")
    assert condition.message == "3 snapshots in a row could not be saved. no snapshot of step 110: no space left"
    (event,) = warnings(HEALTHY, FAILING)
    assert (event.type, event.reason, event.message) == ("Warning", "SnapshotsFailing", condition.message)


@pytest.mark.parametrize(
    "problem",
    [None, DISK_FULL | {"failures": 2}, DISK_FULL | {"failures": "3"}, {}, [], "text"],
    ids=["none", "two in a row", "no number", "nothing", "a list", "text"],
)
def test_less_than_that_is_none(problem: Any) -> None:
    assert after(HEALTHY, snapshotProblem=problem) == HEALTHY


def test_a_fourth_failure_is_no_news() -> None:
    assert after(FAILING, snapshotProblem=DISK_FULL | {"failures": 4}) == FAILING
    assert warnings(FAILING, FAILING) == ()


def test_a_snapshot_that_is_saved_ends_it_and_one_that_is_skipped_does_not() -> None:
    skipped = after(FAILING, snapshotProblem=DISK_FULL | {"result": "skipped", "failures": 0})
    assert cond.holds(skipped.conditions, cond.SNAPSHOTS_FAILING)
    saved = after(FAILING, snapshot={"step": 120, "time": later(60).timestamp(), "verified": True})
    assert not cond.holds(saved.conditions, cond.SNAPSHOTS_FAILING)


@pytest.mark.parametrize(
    "snapshot",
    [None, {"step": 100, "time": later(-60).timestamp(), "verified": True}],
    ids=["a node that saves nothing", "a new attempt, with the last snapshot before"],
)
def test_a_trainer_that_has_not_saved_yet_does_not_end_it(snapshot: Any) -> None:
    assert cond.holds(after(FAILING, snapshot=snapshot).conditions, cond.SNAPSHOTS_FAILING)


@pytest.mark.parametrize("other", [{"uid": "another"}, {"attempt": 1}])
def test_what_another_life_says_counts_for_nothing(other: dict[str, Any]) -> None:
    assert after(HEALTHY, snapshotProblem=DISK_FULL, **other) == HEALTHY


def shutdown(status: DDPJobStatus, needed: Any, limit: Any = 45.0) -> DDPJobStatus:
    return after(status, stopSeconds=needed, shutdownSeconds=limit)


def test_a_save_that_does_not_fit_into_the_shutdown_time_is_a_condition_and_an_event() -> None:
    short = shutdown(HEALTHY, 52.4)
    condition = cond.find(short.conditions, cond.SHUTDOWN_TOO_SHORT)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", "SaveTakesLonger")
    assert condition.message == (
        "Two steps and a snapshot take 52 s, but a pod that has to leave has 45 s: it would be killed before its "
        "snapshot is complete. Set spec.shutdownSeconds to 110 or more"
    )
    (event,) = warnings(HEALTHY, short)
    assert (event.type, event.reason, event.message) == ("Warning", "ShutdownTooShort", condition.message)
    assert shutdown(short, 60.0) == short, "more of the same is no news"


@pytest.mark.parametrize(
    ("needed", "limit", "still"),
    [(44.0, 45.0, True), (36.1, 45.0, True), (35.9, 45.0, False), (52.4, 120.0, False), (None, 45.0, True)],
)
def test_it_ends_once_a_save_fits_well(needed: float | None, limit: float, still: bool) -> None:
    status = shutdown(shutdown(HEALTHY, 52.4), needed, limit)
    assert cond.holds(status.conditions, cond.SHUTDOWN_TOO_SHORT) == still


@pytest.mark.parametrize(("needed", "limit"), [(45.0, 45.0), (None, 45.0), (50.0, None), ("60", 45.0)])
def test_a_save_that_fits_or_was_not_measured_is_none(needed: Any, limit: Any) -> None:
    assert shutdown(HEALTHY, needed, limit) == HEALTHY


def test_snapshots_that_were_set_aside_are_listed_once_the_newest_last() -> None:
    one = [{"step": 80, "message": "snapshot of step 80 is not used: SHA-256 differs"}]
    listed = after(after(HEALTHY, snapshotsSetAside=one), snapshotsSetAside=one)
    assert listed.corrupt_snapshots == (one[0]["message"],)
    assert [event.reason for event in warnings(HEALTHY, listed)] == ["SnapshotCorrupt"]


@pytest.mark.parametrize("count", [MOST_REMEMBERED + 1, 100])
def test_of_many_that_were_set_aside_the_newest_are_listed_and_reported_once(count: int) -> None:
    many = [{"step": step, "message": f"step {step}"} for step in range(count)]
    listed = after(HEALTHY, snapshotsSetAside=many)
    assert listed.corrupt_snapshots == tuple(f"step {step}" for step in range(count - MOST_REMEMBERED, count))
    assert len(warnings(HEALTHY, listed)) == MOST_REMEMBERED
    again = after(listed, snapshotsSetAside=many)
    assert again.corrupt_snapshots == listed.corrupt_snapshots
    assert warnings(listed, again) == ()


def test_one_that_an_earlier_attempt_had_reported_is_not_reported_again_with_nine_others() -> None:
    known = after(HEALTHY, snapshotsSetAside=[{"message": f"{number}"} for number in range(MOST_REMEMBERED)])
    nine = [{"message": "0"}, *({"message": f"later {number}"} for number in range(MOST_REMEMBERED - 1))]
    listed = after(known, snapshotsSetAside=nine)
    assert listed.corrupt_snapshots == tuple(item["message"] for item in nine)
    assert after(listed, snapshotsSetAside=nine) == listed


def test_a_list_that_is_none_is_ignored() -> None:
    for found in (None, "x", [1, {}, {"message": ""}]):
        assert after(HEALTHY, snapshotsSetAside=found) == HEALTHY
