"""Waits of a job, from its writes of the status."""

from __future__ import annotations

from typing import Any

import pytest
from builders import NOW, failed, in_phase, later, make_job, make_pod, seen
from looks import look

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Goodput, Internal, Phase, Progress
from ddpjob_operator.core.ledger.waits import Waits, waits_between

FAILURE = FailureStatus(attempt=0, time=NOW, reason="WorkerKilled")
FAILED_AT_ITS_END: dict[str, Any] = {"last_failure": FAILURE, "attempt_start_time": NOW}
FAILED_BEFORE: dict[str, Any] = {
    "last_failure": FAILURE,
    "attempt_start_time": later(60),
    "progress": Progress(step=7),
}


def status(phase: Phase, trained: float = 0.0, at: float = 0.0, attempt: int = 0, **fields: Any) -> DDPJobStatus:
    """With what the trainer has reported of this attempt, and the seconds of the ledger."""
    known = {name: fields.pop(name, None) for name in ("last_failure", "attempt_start_time", "progress")}
    ledger = Goodput(last_update_time=later(at), **fields)
    return in_phase(
        phase, attempt=attempt, goodput=ledger, internal=Internal(reported_seconds={"training": trained}), **known
    )


STARTING = status(Phase.STARTING, queued=40.0)
RUNNING = status(Phase.RUNNING, queued=40.0, pulling=5.0)


@pytest.mark.parametrize(
    ("before", "after", "waits"),
    [
        (DDPJobStatus(), STARTING, Waits()),
        (STARTING, RUNNING, Waits(queue=40.0)),
        (RUNNING, RUNNING, Waits()),
        (status(Phase.RESTARTING, queued=40.0, training=9.0), RUNNING, Waits()),
        (
            # the time since the last write went to training before the trainer reported any
            status(Phase.RUNNING, training=1.0, queued=40.0, pulling=5.0, first_step=2.0, suspended=99.0),
            status(Phase.RUNNING, trained=3.0, queued=40.0, pulling=5.0, first_step=2.0, suspended=99.0, training=3.0),
            Waits(first_step=47.0),
        ),
        (
            status(Phase.RUNNING, attempt=2, queued=40.0, pulling=5.0, progress=Progress(step=0)),
            status(Phase.RUNNING, attempt=2, trained=3.0, queued=40.0, pulling=5.0, suspended=99.0, training=3.0),
            Waits(first_step=45.0),
        ),
        (
            status(Phase.RUNNING, attempt=2, queued=40.0, training=8.0, progress=Progress(step=7)),
            status(Phase.RUNNING, attempt=2, trained=3.0, queued=40.0, training=11.0, progress=Progress(step=9)),
            Waits(),
        ),
        (
            status(Phase.RUNNING, trained=3.0, training=3.0),
            status(Phase.RUNNING, trained=5.0, training=5.0),
            Waits(),
        ),
        (
            status(Phase.RUNNING, attempt=1, training=8.0, **FAILED_AT_ITS_END),
            status(Phase.RUNNING, trained=2.0, at=30.0, attempt=1, training=10.0, **FAILED_AT_ITS_END),
            Waits(recovery=28.0),
        ),
        (
            status(Phase.RUNNING, attempt=2, training=8.0, **FAILED_AT_ITS_END),
            status(Phase.RUNNING, trained=2.0, at=30.0, attempt=2, training=10.0, **FAILED_AT_ITS_END),
            Waits(recovery=28.0),
        ),
        (
            status(Phase.RUNNING, attempt=2, training=8.0, **FAILED_BEFORE),
            status(Phase.RUNNING, trained=2.0, at=90.0, attempt=2, training=10.0, **FAILED_BEFORE),
            Waits(),
        ),
        (
            status(Phase.RUNNING, attempt=1, training=8.0, **FAILED_BEFORE),
            status(Phase.RUNNING, trained=2.0, at=90.0, attempt=1, training=10.0, **FAILED_BEFORE),
            Waits(),
        ),
    ],
    ids=[
        "it begins to wait",
        "its gang runs for the first time",
        "nothing has happened",
        "it runs again",
        "its first steps",
        "its first steps, after gangs that could not be completed, and a suspension",
        "its first steps after a change of size",
        "more steps",
        "its first steps after a failure",
        "its first steps after a failure, and a gang that could not be completed",
        "its first steps after a suspension, an attempt after the failure",
        "its first steps after a suspension, and before it a live recovery",
    ],
)
def test_a_wait_is_observed_when_it_is_over_and_once(before: DDPJobStatus, after: DDPJobStatus, waits: Waits) -> None:
    assert waits_between(before, after) == waits


def test_the_failure_that_leads_to_an_attempt_is_found_at_the_moment_when_that_begins() -> None:
    after = look(make_job(in_phase(Phase.RUNNING)), seen(failed(0, 1), make_pod(1))).status
    assert after.attempt == 1
    assert after.last_failure is not None
    assert after.last_failure.time == after.attempt_start_time
