"""How many restarts a job may still use up, and how long it waits before the next one.

The budget is refilled by progress: a verified snapshot ahead of where the last failure struck. A job that fails once
a day for a month is healthy, and one that fails three times without getting anywhere is not. Nor is one that fails
every minute, whatever it reports.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

from ddpjob_operator.api.policies import Backoff, Restart
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.changes import recorded, with_refund

JITTER = 0.2

CLOSE_FAILURES = 5
CLOSE_SECONDS = 300.0
"""So many failures within this time refill no budget, whatever progress was reported."""

_LONGEST_DOUBLING = 32


def made_progress(status: DDPJobStatus, now: datetime) -> bool:
    """Whether the newest snapshot is verified, and its step ahead of where the last failure struck.

    What the trainer reports of its snapshots is not enough where failures follow each other closely: one that reports a
    newer snapshot each time would restart for ever, at once and for free.
    """
    if status.snapshot is None or not status.snapshot.verified or _fails_closely(status, now):
        return False
    before = status.last_failure
    marks = (before.step, before.snapshot_step) if before else ()
    return all(mark is None or status.snapshot.step > mark for mark in marks)


def _fails_closely(status: DDPJobStatus, now: datetime) -> bool:
    if len(status.failures) < CLOSE_FAILURES:
        return False
    return 0 <= (now - status.failures[-CLOSE_FAILURES].time).total_seconds() < CLOSE_SECONDS


def refilled(status: DDPJobStatus) -> DDPJobStatus:
    """`status` with the whole budget, and the shortest wait, ahead of it."""
    return recorded(status, restarts_since_progress=0, disruptions_since_progress=0, restart_times=())


def refilled_by_progress(status: DDPJobStatus, now: datetime) -> DDPJobStatus:
    """`status` before an attempt that follows no failure: what came before the progress of this one counts no more. An
    older snapshot is the progress of an attempt before, after which others may have waited in vain.
    """
    begun, saved = status.attempt_start_time, status.snapshot
    is_own = begun is not None and saved is not None and saved.time > begun
    return refilled(status) if is_own and made_progress(status, now) else status


def used_up(policy: Restart, status: DDPJobStatus, now: datetime) -> int:
    """Restarts that count against `policy.max_restarts` now."""
    return status.restarts_since_progress if policy.window_seconds is None else len(_window(policy, status, now))


def spent(policy: Restart, status: DDPJobStatus, now: datetime) -> DDPJobStatus:
    """`status` after one more restart that counts."""
    return recorded(
        status,
        restarts=status.restarts + 1,
        restarts_since_progress=status.restarts_since_progress + 1,
        restart_times=(*_window(policy, status, now), now) if policy.window_seconds else (),
    )


def disrupted(status: DDPJobStatus) -> DDPJobStatus:
    """`status` after one more restart that does not count."""
    return recorded(
        status,
        disruptions=status.disruptions + 1,
        disruptions_since_progress=status.disruptions_since_progress + 1,
    )


def released(status: DDPJobStatus) -> DDPJobStatus:
    """`status` after a gang that could not be completed was released: no restart, but the next wait is longer."""
    return recorded(status, disruptions_since_progress=status.disruptions_since_progress + 1)


def refunded(status: DDPJobStatus) -> DDPJobStatus:
    """`status` after its last restart turned out to be one that does not count."""
    return recorded(
        with_refund(disrupted(status)),
        restarts_since_progress=max(0, status.restarts_since_progress - 1),
        restart_times=status.restart_times[:-1],
    )


def allowance(policy: Restart) -> str:
    """What the budget is, for people."""
    within = f" within {policy.window_seconds} s" if policy.window_seconds is not None else ""
    return f"{policy.max_restarts}{within} without progress"


def backoff_seconds(policy: Backoff, in_a_row: int, key: str) -> float:
    """How long to wait before the restart that follows `in_a_row` others without progress.

    The wait doubles with each of them, as the kubelet's crash-loop back-off does. It is spread by 20 % to either side,
    so that jobs that fell together do not come back together, and never above the maximum; `key` decides where in that
    range it lies, so that the same decision, taken again, is the same.
    """
    seconds = min(policy.max_seconds, policy.initial_seconds * 2.0 ** min(in_a_row, _LONGEST_DOUBLING))
    least, most = seconds * (1 - JITTER), min(float(policy.max_seconds), seconds * (1 + JITTER))
    return round(least + (most - least) * _fraction(key), 3)


def _window(policy: Restart, status: DDPJobStatus, now: datetime) -> tuple[datetime, ...]:
    """Restarts of the window. One that lies ahead, after the clock was set back, is in it: the budget never grows."""
    if policy.window_seconds is None:
        return ()
    begin = now - timedelta(seconds=policy.window_seconds)
    return tuple(time for time in status.restart_times if time > begin)


def _fraction(key: str) -> float:
    """A number from 0 to 1 that looks random, and is always the same for one `key`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48
