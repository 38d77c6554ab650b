"""The decision: given one job and what was seen of its children, what should its status say and what should be done.

`plan` is a pure function of its arguments and level-triggered: it may be called at any time, any number of times,
after any crash. It reaches a fixed point in which the status stays as it is and no action is left.

The order of the decisions is here, the decisions are in `stages`, and `transitions` has every change of phase. A new
attempt is first written into the status and only then acted on, so that it is counted exactly once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob_operator.api.status import FailureStatus, Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.decide import GiveUp, RestartIn, decide, remember, with_clause
from ddpjob_operator.core.failure.detect import (
    Failure,
    find_failures,
    first_cause,
    is_stopping,
    with_last_log_line,
)
from ddpjob_operator.core.failure.log_tail import log_tail, log_to_read
from ddpjob_operator.core.failure.node_lost import lost_nodes, stranded
from ddpjob_operator.core.gang.elastic import wanted_resize
from ddpjob_operator.core.gang.in_place import ended_before
from ddpjob_operator.core.gang.members import members, missing, with_node_counts
from ddpjob_operator.core.gang.spec_changes import edited_while_starting
from ddpjob_operator.core.ledger.goodput import with_goodput
from ddpjob_operator.core.ledger.progress import failure_status, snapshot_events, with_final_report, with_report
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.bounds import clamp_to_bounds
from ddpjob_operator.core.stages.all_or_nothing import plan_release
from ddpjob_operator.core.stages.deadlines import missed_deadline, seconds_to_next
from ddpjob_operator.core.stages.finished import (
    has_finished,
    plan_failed,
    plan_finished,
    plan_refused,
    plan_succeeded,
    seconds_to_live,
)
from ddpjob_operator.core.stages.initialize import plan_initializers
from ddpjob_operator.core.stages.next_attempt import Cause, next_attempt, resize, resume_attempt
from ddpjob_operator.core.stages.prerequisites import plan_prerequisites
from ddpjob_operator.core.stages.run import run
from ddpjob_operator.core.stages.suspend import after_resume, plan_suspension
from ddpjob_operator.core.values.actions import Plan, soonest
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import Observed

SETTLE_LOOK_SECONDS = 0.5


def plan(job: Job, observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """What to do about `job` now. `now` is an aware time; nothing else is read from a clock."""
    if job.deleting:
        return Plan(job.status)  # owner references clean up
    look = Look(clamp_to_bounds(job, defaults.bounds), observed, now, defaults, job.status)
    if job.status.is_final:
        return plan_finished(look)
    decided = _active(look)
    status = with_goodput(job.status, decided.status, observed, now)
    events = (*decided.events, *snapshot_events(job.status, status))
    wait = soonest(decided.requeue_after, _next_moment(look.having(status)))
    return replace(decided, status=status, events=events, requeue_after=wait)


def _active(look: Look) -> Plan:
    """What to do about a job that is not over."""
    look = with_report(transitions.adopt_attempt(look))
    look, decided = _before_gang(look)
    return decided or _gang(look)


def _before_gang(look: Look) -> tuple[Look, Plan | None]:
    """What decides about the job as a whole, and what must be there before its gang; with None that may be created."""
    if has_finished(look):
        return look, plan_succeeded(look)
    if (halted := plan_suspension(look)) is not None:
        return look, halted
    if (resumed := after_resume(look)) is not None:
        if resumed.status.phase is not Phase.PENDING:
            return resumed, resume_attempt(resumed)
        look = resumed
    if (late := missed_deadline(look)) is not None:
        look = _with_failure(look, failure_status(look.status, late, look.now))
        return look, plan_failed(look, late.reason, late.message)
    if look.status.phase in (None, Phase.PENDING):
        admitted = admission(look)
        if isinstance(admitted, Refused):
            return look, plan_refused(look, admitted)
        if (first := plan_prerequisites(look, admitted)) is not None:
            return look, first
    look, fetching = plan_initializers(look)
    if fetching is None and edited_while_starting(look):
        return look, next_attempt(look, Cause("SpecChanged"))
    return look, fetching


def _gang(look: Look) -> Plan:
    """What to do about the gang: its failures first, then its size."""
    pods, restart = members(look), look.job.spec.restart
    failures = find_failures(pods, missing(look), look.now) + lost_nodes(pods, restart, look.now)
    failures = failures or stranded(pods, look.status.attempt, look.observed.report)
    stopping = any(is_stopping(pod, look.now) for pod in pods)
    if failures or stopping:
        cause = first_cause(failures, look.now, stopping=stopping)
        if cause is None:
            return Plan(look.status, requeue_after=SETTLE_LOOK_SECONDS)
        if (read := log_to_read(look.observed, cause)) is not None:
            return Plan(look.status, (read,))  # a log goes with its pod
        return _after_failure(with_node_counts(look), cause)
    if len(pods) < len(look.gang) and look.status.phase is Phase.RUNNING:
        names = ", ".join(pod.name for pod in look.gang if ended_before(pod, look.status))
        message = f"{names} ended before attempt {look.status.attempt} began; it is replaced"
        look = transitions.reopen_gang(look, message)
    if (change := wanted_resize(look)) is not None:
        return resize(look, change)
    if (released := plan_release(look)) is not None:
        return released
    return run(look)


def _after_failure(look: Look, cause: Failure) -> Plan:
    look = look.having(with_final_report(look.status, cause.report, look.now))
    tail = log_tail(look.job, look.observed, cause)
    cause = with_last_log_line(cause, tail)
    decision, failure = decide(look, cause), failure_status(look.status, cause, look.now, tail)
    match decision:
        case GiveUp(reason, message):
            return plan_failed(_with_failure(look, failure), reason, message)
        case RestartIn(seconds, after, why):
            look = _with_failure(look.having(after), failure)
            return next_attempt(look, Cause(failure.reason, with_clause(cause.message, why), seconds))


def _with_failure(look: Look, failure: FailureStatus) -> Look:
    """The look with what will be known of a failure when its pods are gone."""
    failures = remember(look.status.failures, failure)
    return look.having(recorded(look.status, last_failure=failure, failures=failures))


def _next_moment(look: Look) -> float | None:
    """Seconds to the next deadline, or to the end of the time that a job which has just ended has to live."""
    live = seconds_to_live(look)
    return seconds_to_next(look) if live is None else live
