"""A gang without a failure: create missing pods, delete those of older attempts, update the status."""

from __future__ import annotations

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.node_lost import until_lost
from ddpjob_operator.core.gang.elastic import grace_of_old, still_saving, until_resized
from ddpjob_operator.core.gang.members import discard, fill_gang, left_over, members, with_node_counts
from ddpjob_operator.core.gang.spares import ready_spares, spare_actions, wanted
from ddpjob_operator.core.gang.spec_changes import digests
from ddpjob_operator.core.gang.startup_problems import (
    is_degraded,
    startup_problem,
    until_startup_problem,
    until_warnings_are_read,
    warnings_to_read,
    with_scheduled,
)
from ddpjob_operator.core.manifests.admission import admission, edited_fields
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.pods import build_service
from ddpjob_operator.core.stages.all_or_nothing import LEAST_WAIT_SECONDS, until_released
from ddpjob_operator.core.stages.finished import plan_refused
from ddpjob_operator.core.values.actions import Action, CreateService, Event, Plan, soonest
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.look import Look


def run(look: Look) -> Plan:
    """Complete and tend the gang of the current attempt."""
    pods, spares = members(look), len(ready_spares(look))
    stale: tuple[Action, ...] = discard(look, left_over(look), grace_seconds=grace_of_old(look.status))
    wait = _backoff_left(look) or still_saving(look)
    if wait > 0 and not pods:
        return Plan(with_node_counts(look, spares).status, stale, requeue_after=wait)
    create: tuple[Action, ...] = ()
    if look.status.phase is not Phase.RUNNING:
        admitted = admission(look)
        if isinstance(admitted, Refused):
            return plan_refused(look, admitted)
        if look.observed.service is None:
            # even if every pod is there: whether it selects this attempt has to be looked at
            return Plan(look.status, (*stale, CreateService(build_service(admitted, look.status.attempt))))
        create = fill_gang(look, admitted)
    create = (*create, *spare_actions(look))
    before = with_node_counts(look, spares)
    after, events = _advanced(before)
    after = _with_problems(after)
    status = after.status
    running = status.phase is Phase.RUNNING
    return Plan(
        status,
        (*stale, *create, *warnings_to_read(after, pods)),
        # the digests of the spec must be on record before any pod is made from it, and that a gang is incomplete again
        # before what shows it is deleted
        status_first=before.status.phase in (None, Phase.PENDING) or before.status.phase is not look.job.status.phase,
        requeue_after=soonest(
            None if running else until_startup_problem(after),
            until_warnings_are_read(after, pods),
            until_released(after),
            until_lost(look.observed.pods, look.job.spec.restart, look.now),
            until_resized(after),
            # spares are created once it is on record that the gang runs
            0.0 if running and before.status.phase is not Phase.RUNNING and wanted(after) else None,
        ),
        events=events,
    )


def _backoff_left(look: Look) -> float:
    """Seconds until the next attempt may start. More than any backoff means that the clock was set back."""
    times = (look.status.restart_at, look.status.retry_at)
    left = [look.seconds_until(time) for time in times if time is not None]
    most = max(look.job.spec.restart.backoff.max_seconds, LEAST_WAIT_SECONDS)
    return max((seconds for seconds in left if seconds <= most), default=0.0)


def _advanced(look: Look) -> tuple[Look, tuple[Event, ...]]:
    """The phase that follows from the pods that are there, by the node counts of the status."""
    status = look.status
    if status.phase in (None, Phase.PENDING):
        event = Event("Normal", "Starting", f"creating {look.job.spec.nodes} nodes")
        return transitions.start_gang(look, digests(look.job, look.defaults)), (event,)
    if status.phase is not Phase.RUNNING and status.nodes.ready == status.nodes.total:
        message = f"all {len(members(look))} nodes run, attempt {status.attempt}"
        return transitions.mark_running(look, message), (Event("Normal", "Running", message),)
    return look, ()


def _with_problems(look: Look) -> Look:
    """The look with what is wrong, if anything is."""
    job = look.job
    look = look.having(recorded(look.status, observed_generation=job.generation))
    if edited := edited_fields(job, look.status):
        names = ", ".join(f"spec.{name}" for name in edited)
        message = (
            f"{names} changed while the job runs; attempt {look.status.attempt} keeps the old spec, and a later "
            "attempt would use the new one. Revert the edit, or delete the job and apply it again"
        )
        return transitions.degrade(look, Problem("SpecChanged", message))
    if job.rejected_edit:
        return transitions.degrade(look, job.rejected_edit)
    pods, running = members(look), look.status.phase is Phase.RUNNING
    problem = startup_problem(look, pods)
    if not running:
        look = with_scheduled(look, pods, problem)
    if problem is not None and is_degraded(problem):
        return transitions.degrade(look, problem)
    total = look.status.nodes.total
    if running and job.spec.elastic is not None and total < job.spec.nodes:
        message = f"training with {total} of {job.spec.nodes} nodes until more are available"
        return transitions.degrade(look, Problem("FewerNodes", message))
    return transitions.recover(look)
