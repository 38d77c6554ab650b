"""The decision: given one job and what was observed of its children, its new status and the actions to take.

`plan` is a pure function of its arguments and level-triggered: it may be called at any time, any number of times,
after any crash. It reaches a fixed point in which the status stays as it is and no action is left.

Which stage decides is here; `stages` has one module for each, and `transitions` every change of phase. A new attempt
is first written into the status and only then acted on, so that it is counted exactly once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.gang.problems import degraded_events
from ddpjob_operator.core.ledger.goodput import with_goodput
from ddpjob_operator.core.ledger.progress import warnings, with_failure, with_report
from ddpjob_operator.core.ledger.usage import with_usage
from ddpjob_operator.core.manifests.bounds import clamp_to_bounds
from ddpjob_operator.core.stages.deadlines import missed_deadline, seconds_to_next
from ddpjob_operator.core.stages.ends import releases_of_deleted_job, with_ends, with_releases
from ddpjob_operator.core.stages.finished import (
    has_finished,
    plan_failed,
    plan_finished,
    plan_succeeded,
    seconds_to_live,
)
from ddpjob_operator.core.stages.late_cause import until_late_cause, with_late_cause
from ddpjob_operator.core.stages.pending import plan_pending
from ddpjob_operator.core.stages.restart import resume_attempt
from ddpjob_operator.core.stages.running import plan_running
from ddpjob_operator.core.stages.starting import plan_starting
from ddpjob_operator.core.stages.suspend import is_suspended, plan_suspension
from ddpjob_operator.core.values.actions import Action, Plan, creates, depends_on_status, soonest
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import Observed


def plan(job: Job, observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """What to do about `job` now. `now` is an aware time; nothing else is read from a clock."""
    if job.deleting:
        return Plan(job.status, releases_of_deleted_job(observed.pods))  # owner references clean up
    look = Look(clamp_to_bounds(job, defaults.bounds), observed, now, defaults, job.status)
    if job.status.is_final:
        decided = with_releases(look, plan_finished(look))
        return replace(decided, status=transitions.observed(decided.status, job.generation))
    adopted = transitions.adopt_attempt(look)
    ended, found = with_late_cause(with_ends(with_report(adopted)))
    # what follows from a cause is decided once that is on record: a restart is taken back before another one is counted
    decided = with_releases(look, Plan(ended.status, requeue_after=0.0) if found else _by_stage(ended))
    if observed.problem is not None and observed.problem.final:
        decided = replace(decided, actions=tuple(action for action in decided.actions if not creates(action)))
    status = transitions.observed(_with_ledger(job, decided.status, observed, now), job.generation)
    events = (*found, *decided.events, *warnings(job.status, status))
    if not any(event.type == "Warning" for event in decided.events):  # which says the same, as GangReleased does
        events = (*events, *degraded_events(job.status, status))
    status_first = decided.status_first or adopted.status != job.status
    wait = soonest(
        decided.requeue_after, until_late_cause(look.with_status(status)), _next_moment(look.with_status(status))
    )
    return replace(
        decided,
        status=status,
        events=events,
        requeue_after=wait,
        status_first=status_first,
        confirm_first=_must_confirm(job, observed, decided.actions, guarded=status_first and status != job.status),
    )


def _must_confirm(job: Job, observed: Observed, actions: tuple[Action, ...], *, guarded: bool) -> bool:
    """Whether the status may be too old for these actions: some pod is newer, or this process has only seen the job in
    a list or a watch. A write of the status before them (`guarded`) confirms it, by its resourceVersion.
    """
    if actions and any(pod.attempt > job.status.attempt for pod in observed.pods):
        return True
    return not (observed.status_confirmed or guarded) and any(depends_on_status(action) for action in actions)


def _with_ledger(job: Job, after: DDPJobStatus, observed: Observed, now: datetime) -> DDPJobStatus:
    """The ledger decides nothing: numbers that it cannot add up must not keep a job from being suspended or ended."""
    try:
        return with_usage(job.status, with_goodput(job.status, after, observed, now), job.spec.accelerators_per_node)
    except (ArithmeticError, ValueError):
        return after


def _by_stage(look: Look) -> Plan:
    """The stage of a job that is not over: success, suspension and deadlines come in any phase, the rest goes by it."""
    if has_finished(look):
        return plan_succeeded(look)
    if is_suspended(look):
        return plan_suspension(look) or _resume(look)
    if (late := missed_deadline(look)) is not None:
        return plan_failed(with_failure(look, late), late.reason, late.message)
    match look.status.phase:
        case Phase.STARTING | Phase.RESTARTING:
            return plan_starting(look)
        case Phase.RUNNING:
            return plan_running(look)
        case _:
            return plan_pending(look)


def _resume(look: Look) -> Plan:
    """What has run before needs a new attempt; what has not is Pending, as any new job."""
    look = transitions.resume(look)
    return _by_stage(look) if look.status.phase is Phase.PENDING else resume_attempt(look)


def _next_moment(look: Look) -> float | None:
    """Seconds to the next deadline, or to the end of the time that a job which has just ended has to live."""
    live = seconds_to_live(look)
    return seconds_to_next(look) if live is None else live
