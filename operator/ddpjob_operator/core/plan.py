"""The decision: given one job and what was seen of its children, what should its status say and what should be done.

`plan` is a pure function of its arguments and level-triggered: it may be called at any time, any number of times,
after any crash. It reaches a fixed point in which the status stays as it is and no action is left.

The life of a job: Pending (Service and claim) → Starting (pods) → Running → Succeeded; a failure leads through
Restarting to the next attempt, or to Failed. A new attempt is first written into the status and only then acted on,
so that it is counted exactly once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase
from ddpjob_operator.core.failure.decide import GiveUp, RestartIn, decide, remember, with_clause
from ddpjob_operator.core.failure.detect import Failure, find_failures, first_cause, is_stopping, with_last_words
from ddpjob_operator.core.failure.log_tail import log_tail, log_to_read
from ddpjob_operator.core.failure.node_lost import lost_nodes, stranded
from ddpjob_operator.core.gang.elastic import wanted_resize
from ddpjob_operator.core.gang.in_place import ended_before
from ddpjob_operator.core.gang.members import counted, gang_of, gang_size, missing
from ddpjob_operator.core.gang.spec_changes import edited_while_starting
from ddpjob_operator.core.ledger.goodput import with_goodput
from ddpjob_operator.core.ledger.progress import (
    failure_status,
    snapshot_events,
    with_final_report,
    with_report,
    with_snapshot_news,
)
from ddpjob_operator.core.manifests.bounds import BEYOND, clamp_to_bounds
from ddpjob_operator.core.stages.all_or_nothing import plan_release
from ddpjob_operator.core.stages.deadlines import missed_deadline, seconds_to_next
from ddpjob_operator.core.stages.finished import has_finished, plan_finished, seconds_to_live
from ddpjob_operator.core.stages.initialize import plan_initializers
from ddpjob_operator.core.stages.next_attempt import next_attempt, resize
from ddpjob_operator.core.stages.prerequisites import not_allowed, plan_preparation
from ddpjob_operator.core.stages.run import keep_going
from ddpjob_operator.core.stages.suspend import plan_suspension, status_after_resume
from ddpjob_operator.core.stages.transitions import incomplete_again, plan_failed, plan_succeeded
from ddpjob_operator.core.values.actions import Event, Plan, soonest
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import Observed, PodView

SETTLE_LOOK_SECONDS = 0.5


def plan(job: Job, observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """What to do about `job` now. `now` is an aware time; nothing else is read from a clock."""
    if job.deleting:
        return Plan(job.status)  # owner references clean up
    if job.status.is_final:
        return plan_finished(job, observed, now)
    decided = _live(job, observed, now, defaults)
    decided = replace(
        decided,
        status=with_goodput(job.status, decided.status, observed, now),
        events=(*decided.events, *snapshot_events(job.status, decided.status)),
    )
    return replace(decided, requeue_after=soonest(decided.requeue_after, _next_moment(job, observed, decided, now)))


def _live(job: Job, observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """What to do about a job that is not over."""
    job = clamp_to_bounds(job, defaults.bounds)
    status = with_report(_adopted(job.status, observed), observed.report, job.uid, now)
    status = with_snapshot_news(job, status, observed.report, now)
    gang = gang_of(observed, status)
    pods = tuple(pod for pod in gang if not ended_before(pod, status))
    status, decided = _before_gang(job, observed, status, pods, now, defaults)
    return decided or _gang(job, observed, status, gang, pods, now, defaults)


def _before_gang(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime, defaults: Defaults
) -> tuple[DDPJobStatus, Plan | None]:
    """What decides about the job as a whole, and what must be there before its gang; with None that may be made."""
    if has_finished(job, status, pods):
        return status, plan_succeeded(job, observed, status, pods, now)
    if (halted := plan_suspension(job, observed, status, now)) is not None:
        return status, halted
    if (awake := status_after_resume(job, status, now)) is not None:
        if awake.phase is not Phase.PENDING:
            return awake, _after_suspension(job, observed, awake, now, defaults)
        status = awake
    if (late := missed_deadline(job, observed, status, pods, now)) is not None:
        status = _recorded(status, failure_status(status, late, now))
        return status, plan_failed(job, observed, status, late.reason, late.message, now)
    if status.phase in (None, Phase.PENDING):
        if problems := not_allowed(job, defaults):
            return status, plan_failed(job, observed, status, BEYOND, "; ".join(problems), now)
        if (first := plan_preparation(job, observed, status, now, defaults)) is not None:
            return status, first
    status, fetching = plan_initializers(job, observed, status, now, defaults)
    if fetching is None and edited_while_starting(job, status, pods, gang_size(job, status)):
        return status, next_attempt(job, observed, status, now, defaults, delay=0.0, why="SpecChanged")
    return status, fetching


def _gang(
    job: Job,
    observed: Observed,
    status: DDPJobStatus,
    gang: tuple[PodView, ...],
    pods: tuple[PodView, ...],
    now: datetime,
    defaults: Defaults,
) -> Plan:
    """What to do about the gang: its failures first, then its size. `pods` are those of `gang` that joined it."""
    failures = find_failures(pods, missing(job, status, gang), now) + lost_nodes(pods, job.spec.restart, now)
    failures = failures or stranded(pods, status.attempt, observed.report)
    stopping = any(is_stopping(pod, now) for pod in pods)
    if failures or stopping:
        cause = first_cause(failures, now, stopping=stopping)
        if cause is None:
            return Plan(status, requeue_after=SETTLE_LOOK_SECONDS)
        if (read := log_to_read(observed, cause)) is not None:
            return Plan(status, (read,))  # a log goes with its pod
        return _after_failure(job, observed, counted(job, status, pods), cause, now, defaults)
    if len(pods) < len(gang) and status.phase is Phase.RUNNING:
        status = incomplete_again(job, status, gang, now)
    if (change := wanted_resize(job, observed, status, pods, now)) is not None:
        return resize(job, observed, status, change, now, defaults)
    if (given_back := plan_release(job, observed, status, pods, now, defaults)) is not None:
        return given_back
    return keep_going(job, observed, status, pods, now, defaults)


def _next_moment(job: Job, observed: Observed, decided: Plan, now: datetime) -> float | None:
    """Seconds to the next deadline, or to the end of the time that a job which has just ended has to live."""
    live = seconds_to_live(job, decided.status, now)
    return seconds_to_next(job, observed, decided.status, now) if live is None else live


def _adopted(status: DDPJobStatus, observed: Observed) -> DDPJobStatus:
    """A status that was lost (restored from a backup, say) learns its attempt from the pods that are there.

    The attempts that it does not know of count as restarts: the budget is not refilled by a loss.
    """
    unknown = max((pod.attempt for pod in observed.pods), default=0) - status.attempt
    if unknown <= 0:
        return status
    return status.model_copy(
        update={
            "attempt": status.attempt + unknown,
            "restarts": status.restarts + unknown,
            "restarts_since_progress": status.restarts_since_progress + unknown,
        }
    )


def _after_failure(
    job: Job, observed: Observed, status: DDPJobStatus, cause: Failure, now: datetime, defaults: Defaults
) -> Plan:
    status = with_final_report(status, cause.report, now)
    tail, ran_on = log_tail(job, observed, cause), [pod.node_name for pod in observed.pods]
    cause = with_last_words(cause, tail)
    verdict, failure = decide(job, status, cause, now, ran_on), failure_status(status, cause, now, tail)
    match verdict:
        case GiveUp(reason, message):
            return plan_failed(job, observed, _recorded(status, failure), reason, message, now)
        case RestartIn(seconds, after, said):
            after, message = _recorded(after, failure), with_clause(cause.message, said)
            return next_attempt(job, observed, after, now, defaults, delay=seconds, why=failure.reason, message=message)


def _recorded(status: DDPJobStatus, failure: FailureStatus) -> DDPJobStatus:
    """`status` with what will be known of a failure when its pods are gone."""
    return status.model_copy(update={"last_failure": failure, "failures": remember(status.failures, failure)})


def _after_suspension(job: Job, observed: Observed, status: DDPJobStatus, now: datetime, defaults: Defaults) -> Plan:
    decided = next_attempt(
        job, observed, status, now, defaults, delay=0.0, why="Resumed", message="the job was suspended"
    )
    if decided.status.is_final:
        return decided
    resumed = Event("Normal", "Resumed", f"resumed after a suspension with attempt {decided.status.attempt}")
    return replace(decided, events=(resumed,))
