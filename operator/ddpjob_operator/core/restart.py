"""Whether a failed gang is started again, and when.

A failure after progress (a new snapshot, ahead of where the last failure struck) is restarted at once: waiting would
only add to what was lost. Failures in a row without progress wait twice as long each time (as Kubernetes' own crash
loop back-off does).
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.api.policies import Restart
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.failures import Failure, Retry


@dataclass(frozen=True, slots=True)
class RestartIn:
    """Start the next attempt after so many seconds."""

    seconds: float
    restarts_since_progress: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job is Failed, and why."""

    reason: str
    message: str


def decide(policy: Restart, status: DDPJobStatus, failure: Failure) -> RestartIn | GiveUp:
    """What to do after `failure`, given the status before it."""
    if failure.retry is Retry.NEVER:
        return GiveUp(failure.reason, failure.message)
    if status.restarts >= policy.max_restarts:
        used = f"all {policy.max_restarts} restarts are used up" if policy.max_restarts else "restart.maxRestarts is 0"
        return GiveUp("BackoffLimitExceeded", f"{used}; last failure: {failure.message}")
    if made_progress(status):
        return RestartIn(0.0, 0)
    in_a_row = status.restarts_since_progress
    seconds = min(policy.backoff.max_seconds, policy.backoff.initial_seconds * 2 ** min(in_a_row, 32))
    return RestartIn(float(seconds), in_a_row + 1)


def made_progress(status: DDPJobStatus) -> bool:
    """Whether the newest snapshot is newer than the last failure, and ahead of where that struck."""
    if status.snapshot is None:
        return False
    before = status.last_failure
    marks = (before.step, before.snapshot_step) if before else ()
    return all(mark is None or status.snapshot.step > mark for mark in marks)
