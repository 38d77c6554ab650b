"""Whether a failed gang is started again, and when."""

from __future__ import annotations

import pytest
from builders import NOW

from ddpjob_operator.api.policies import Backoff, Restart
from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, SnapshotStatus
from ddpjob_operator.core.failures import Failure, Retry
from ddpjob_operator.core.restart import GiveUp, RestartIn, decide, made_progress

KILLED = Failure("WorkerKilled", "rank 1 was killed", Retry.YES)


def status(
    *,
    restarts: int = 0,
    in_a_row: int = 0,
    snapshot: int | None = None,
    struck: int | None = None,
    had: int | None = None,
    failed_before: bool = False,
) -> DDPJobStatus:
    before = FailureStatus(attempt=0, time=NOW, reason="WorkerKilled", step=struck, snapshot_step=had)
    return DDPJobStatus(
        restarts=restarts,
        restarts_since_progress=in_a_row,
        snapshot=None if snapshot is None else SnapshotStatus(step=snapshot, time=NOW, verified=True),
        last_failure=before if failed_before or struck is not None or had is not None else None,
    )


@pytest.mark.parametrize(
    ("in_a_row", "seconds"),
    [(0, 1), (1, 2), (2, 4), (3, 8), (7, 128), (8, 256), (9, 300), (32, 300), (10_000, 300)],
)
def test_the_wait_doubles_with_each_failure_without_progress_up_to_its_maximum(in_a_row: int, seconds: int) -> None:
    policy = Restart(max_restarts=10_000)
    assert decide(policy, status(in_a_row=in_a_row), KILLED) == RestartIn(float(seconds), in_a_row + 1)


@pytest.mark.parametrize(
    ("initial", "longest", "in_a_row", "seconds"),
    [
        pytest.param(0, 300, 5, 0.0, id="an initial wait of nothing stays nothing"),
        pytest.param(10, 300, 2, 40.0, id="the initial wait is what doubles"),
        pytest.param(5, 5, 3, 5.0, id="a maximum equal to the initial wait makes it constant"),
    ],
)
def test_the_wait_follows_the_policy(initial: int, longest: int, in_a_row: int, seconds: float) -> None:
    policy = Restart(backoff=Backoff(initial_seconds=initial, max_seconds=longest))
    assert decide(policy, status(in_a_row=in_a_row), KILLED) == RestartIn(seconds, in_a_row + 1)


def test_after_progress_a_restart_is_immediate_and_the_wait_begins_anew() -> None:
    assert decide(Restart(), status(in_a_row=4, snapshot=200, struck=150, had=100), KILLED) == RestartIn(0.0, 0)


@pytest.mark.parametrize(
    ("before", "progress"),
    [
        pytest.param(status(), False, id="no snapshot is no progress"),
        pytest.param(status(failed_before=True), False, id="no snapshot after a failure is no progress"),
        pytest.param(status(snapshot=100), True, id="a snapshot before any failure is progress"),
        pytest.param(status(snapshot=200, struck=150, had=100), True, id="a new snapshot ahead of it is progress"),
        pytest.param(status(snapshot=120, struck=150, had=100), False, id="a new snapshot behind the failure is none"),
        pytest.param(status(snapshot=100, struck=150, had=100), False, id="the old snapshot is none"),
        pytest.param(status(snapshot=100, struck=0, had=100), False, id="failing before the first step makes none"),
        pytest.param(status(snapshot=100, had=100), False, id="a failure at an unknown step makes none"),
        pytest.param(status(snapshot=100, failed_before=True), True, id="the first snapshot ever is progress"),
    ],
)
def test_progress_is_a_snapshot_that_was_not_there_at_the_last_failure(before: DDPJobStatus, progress: bool) -> None:
    assert made_progress(before) is progress


@pytest.mark.parametrize(
    ("most", "used", "again"), [(10, 9, True), (10, 10, False), (10, 11, False), (0, 0, False), (1, 0, True)]
)
def test_the_budget_is_exactly_max_restarts(most: int, used: int, again: bool) -> None:
    verdict = decide(Restart(max_restarts=most), status(restarts=used), KILLED)
    assert isinstance(verdict, RestartIn) is again
    if isinstance(verdict, GiveUp):
        assert verdict.reason == "BackoffLimitExceeded"
        assert "rank 1 was killed" in verdict.message


def test_what_makes_no_sense_to_retry_is_given_up_with_budget_left() -> None:
    verdict = decide(Restart(), status(), Failure("ImportError", "no module named foo", Retry.NEVER))
    assert verdict == GiveUp("ImportError", "no module named foo")
