"""Data before the gang: one pod that runs the job's initializers in order, once for the whole job.

A gang of GPUs must not wait for a download, and must not download the same thing once a node. So nothing of the gang
is created before the condition Initialized holds. A try that fails is counted in the status before its pod is deleted,
and is repeated after the backoff of a restart, under another name; what it had finished it finds on the volume. One
that the cluster ended is repeated likewise, and uses up none of the tries.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.budget import backoff_seconds
from ddpjob_operator.core.failure.detect import EXIT_USER, SETTLE_SECONDS, Failure, Retry, find_failures
from ddpjob_operator.core.failure.node_lost import is_lost, lost_nodes, patience, until_forced, until_lost
from ddpjob_operator.core.failure.restart_rules import DISRUPTIONS
from ddpjob_operator.core.gang.children import lost_children, missing_children
from ddpjob_operator.core.gang.creation import until_creatable
from ddpjob_operator.core.gang.members import awaits_data, discard
from ddpjob_operator.core.gang.problems import (
    STARTUP_GRACE_SECONDS,
    is_degraded,
    startup_problem,
    until_warnings_are_read,
    warnings_to_read,
)
from ddpjob_operator.core.ledger.progress import failure_status
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.stages.finished import plan_failed, plan_refused
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, CreateChild, DeletePod, Event, Plan, soonest
from ddpjob_operator.core.values.changes import recorded, with_tries
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import InitializerView, PodPhase, Termination
from ddpjob_operator.core.values.trainer_report import read_termination

RETRIES = 3
"""Tries after the first one that failed."""

FAILED = "InitializerFailed"
_GRACE_SECONDS = 2


def plan_initializers(look: Look) -> tuple[Look, Plan | None]:
    """Run the initializers. With None the gang may be created, and the status says so."""
    if not awaits_data(look):
        return look, None
    lost, pod = look.status.start_time is None, look.observed.initializer
    look = transitions.begin(look)
    wrong = cond.find(look.status.conditions, cond.DEGRADED)
    if look.job.rejected_edit is not None:
        look = transitions.degrade(look, look.job.rejected_edit)
    elif wrong is not None and wrong.reason == transitions.INVALID_SPEC:  # it was repaired, maybe during a backoff
        look = transitions.recover(look)
    if pod is not None and pod.number > _tries(look.status):
        if not lost:  # no try has this number
            return look, Plan(look.status, () if pod.deleting else (DeletePod(pod.name, pod.uid, _GRACE_SECONDS),))
        failures = min(pod.number, RETRIES)  # after more there is no pod: the cluster has ended the others
        look = look.with_status(with_tries(look.status, failures=failures, disruptions=pod.number - failures))
    if pod is None or pod.number < _tries(look.status):
        return look, _begin(look, pod)
    if pod.succeeded:
        return with_data(look), None
    if pod.deleting and (left := _grace_left(look, pod)) > 0:
        return look, Plan(look.status, requeue_after=left)  # its end comes as an event, unless its node is gone
    if pod.over or pod.deleting or is_lost(pod.as_pod(look.status.attempt), patience(look), look.now):
        return look, _after_failure(look, pod)
    return look, _waiting(look, pod)


def with_data(look: Look) -> Look:
    """The look with the success of the initializers on record, if their pod has succeeded."""
    pod, count = look.observed.initializer, len(look.job.spec.initializers)
    if pod is None or not pod.succeeded or not awaits_data(look) or pod.number < _tries(look.status):
        return look
    which = f"{count} initializers have" if count > 1 else "it has"
    return transitions.mark_initialized(look, f"{which} prepared the volume")


def _tries(status: DDPJobStatus) -> int:
    """How many pods have been used up."""
    return status.initializer_failures + (status.internal.initializer_disruptions or 0)


def left_over_sidecars(look: Look) -> tuple[DeletePod, ...]:
    """The pod of initializers that are done, where a sidecar goes on: it would hold what they asked for until the end
    of the job. The pod is the proof that they are done until that is on record.
    """
    pod = look.observed.initializer
    if pod is None or not pod.done or pod.ended or pod.deleting:
        return ()
    recorded_before = cond.holds(look.job.status.conditions, cond.INITIALIZED)
    return (DeletePod(pod.name, pod.uid, _GRACE_SECONDS),) if recorded_before else ()


def _begin(look: Look, old: InitializerView | None) -> Plan:
    left = () if old is None else (old.as_pod(look.status.attempt),)
    stale: tuple[Action, ...] = discard(look, left, grace_seconds=_GRACE_SECONDS)
    wait = look.seconds_until(look.status.retry_at) if look.status.retry_at is not None else 0.0
    if 0 < wait <= max(look.job.spec.restart.backoff.max_seconds, _GRACE_SECONDS):  # more: the clock was set back
        forcing = until_forced(left, look.job.spec.restart, look.now)
        return Plan(look.status, stale, requeue_after=soonest(wait, forcing))
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return plan_refused(look, admitted)
    if look.observed.problem is not None:
        look = transitions.degrade(look, look.observed.problem)
    if missing := missing_children(look, admitted):
        return Plan(look.status, (*stale, *missing), requeue_after=0.0)
    pod = build_initializer(admitted, _tries(look.status))
    if (wait := until_creatable(look, pod["metadata"]["name"])) > 0:
        return Plan(look.status, stale, requeue_after=wait)
    # that a suspension is over must be on record before there is a pod again that it would stop
    before = cond.find(look.job.status.conditions, cond.SUSPENDED)
    resumed = cond.find(look.status.conditions, cond.SUSPENDED) != before
    return Plan(look.status, (*stale, CreateChild(pod)), status_first=resumed)


def _waiting(look: Look, pod: InitializerView) -> Plan:
    names = ", ".join(item.name for item in look.job.spec.initializers)
    events: tuple[Event, ...] = ()
    if cond.find(look.status.conditions, cond.INITIALIZED) is None:
        events = (Event("Normal", "Initializing", f"running initializers: {names}"),)
    look = transitions.mark_uninitialized(look, "Initializing", f"pod {pod.name} prepares the volume: {names}")
    pods = (pod.as_pod(look.status.attempt),)
    problem = look.job.rejected_edit or startup_problem(look, pods)
    wrong = problem is not None and is_degraded(problem)
    look = transitions.degrade(look, problem) if problem is not None and wrong else transitions.recover(look)
    wait = soonest(
        STARTUP_GRACE_SECONDS if pod.phase is PodPhase.PENDING else None,
        until_warnings_are_read(look, pods),
        until_lost(pods, patience(look), look.now),
    )
    actions = (*warnings_to_read(look, pods), *lost_children(look))
    return Plan(look.status, actions, requeue_after=wait, events=events)


def _after_failure(look: Look, pod: InitializerView) -> Plan:
    cause, final = _cause(pod)
    disruption = None if final else _disruption(look, pod)
    failures, disruptions = look.status.initializer_failures, look.status.internal.initializer_disruptions or 0
    if disruption is None:
        failures += 1
    else:
        disruptions += 1
    look = look.with_status(with_tries(look.status, failures=failures, disruptions=disruptions))
    if final or failures > RETRIES:
        ended = f", of which the cluster ended {disruptions}" if disruptions else ""
        return _give_up(look, pod, cause if final else f"{cause}; it was tried {pod.number + 1} times{ended}")
    delay = backoff_seconds(look.job.spec.restart.backoff, pod.number, f"{look.job.uid}/init-{pod.number}")
    cost = (
        f"{failures} of {RETRIES} times" if disruption is None else f"{disruption} is a disruption: it does not count"
    )
    message = f"{cause}; retrying in {delay:.0f} s ({cost})"
    look = transitions.retry_initializers(transitions.mark_uninitialized(look, FAILED, message), delay)
    return Plan(
        look.status,
        (DeletePod(pod.name, pod.uid, _GRACE_SECONDS),),
        status_first=True,
        requeue_after=delay,
        events=(Event("Warning", FAILED, message.splitlines()[0]),),
    )


def _give_up(look: Look, pod: InitializerView, message: str) -> Plan:
    look = transitions.mark_uninitialized(look, FAILED, message)
    ended = _failed_end(pod)
    code = ended.exit_code if ended is not None else None
    failure = Failure(FAILED, message, Retry.NEVER, pod_name=pod.name, exit_code=code)
    look = look.with_status(recorded(look.status, last_failure=failure_status(look.status, failure, look.now)))
    return plan_failed(look, FAILED, message)


def _cause(pod: InitializerView) -> tuple[str, bool]:
    """What went wrong, for people, and whether another try would only do the same."""
    ended = _failed_end(pod)
    if ended is None:
        return f"pod {pod.name}: {pod.message or pod.reason or f'node {pod.node_name} is gone'}", False
    name = f"initializer {pod.step}" if pod.step else f"pod {pod.name}"
    report = read_termination(ended.message)
    exit_ = f"exited with code {ended.exit_code}" + (f" ({ended.reason})" if ended.reason else "")
    return f"{name}: {(report.message if report else '') or exit_}", ended.exit_code == EXIT_USER


def _failed_end(pod: InitializerView) -> Termination | None:
    """How the initializer ended that failed, if one did. Those that are done say nothing of why the pod ended."""
    ended = pod.termination
    return ended if ended is not None and ended.exit_code else None


def _disruption(look: Look, pod: InitializerView) -> str | None:
    """What of the cluster's doing ended the pod, as of one of the gang; None if it failed by itself."""
    view = replace(
        pod.as_pod(look.status.attempt),
        disruption=pod.disruption,
        disruption_message=pod.disruption_message,
        termination=_failed_end(pod),
    )
    found = (*find_failures((view,), (), look.now), *lost_nodes((view,), patience(look), look.now))
    return next((failure.reason for failure in found if failure.reason in DISRUPTIONS), None)


def _grace_left(look: Look, pod: InitializerView) -> float:
    """Seconds in which the end of a pod that is being deleted may still be confirmed."""
    return SETTLE_SECONDS - look.seconds_since(pod.gone_by or look.now)
