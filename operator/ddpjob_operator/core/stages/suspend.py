"""Suspension: the job stops as a whole, after a snapshot, and gives its nodes back.

That it stops is on record (condition Suspended is False, for the reason Suspending) before any pod is asked to, so that
how the pods end is never taken for a failure, not even by an operator that was started meanwhile. Once all pods are
gone the phase is Suspended. Resumed, the job begins a new attempt, which costs no budget: a new attempt is what keeps a
pod that was thought dead from writing to the volume.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.detect import SETTLE_SECONDS, last_report, last_snapshots
from ddpjob_operator.core.failure.node_lost import force_deletions, until_forced
from ddpjob_operator.core.gang.children import all_groups
from ddpjob_operator.core.gang.members import discard
from ddpjob_operator.core.gang.problems import startup_problem
from ddpjob_operator.core.ledger.progress import with_final_report, with_snapshot
from ddpjob_operator.core.stages.initialize import with_data
from ddpjob_operator.core.transitions import SUSPENDING
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, Event, Plan, soonest
from ddpjob_operator.core.values.job import few
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import InitializerView, PodView


def is_suspended(look: Look) -> bool:
    """Whether the job is suspended, is to be, or was until now."""
    status = look.status
    return look.job.spec.suspend or status.phase is Phase.SUSPENDED or is_suspending(status)


def plan_suspension(look: Look) -> Plan | None:
    """What to do about a job that is suspended, or on its way there; None if it may run again.

    A suspension that is taken back while pods still stop is carried through: they end anyway, and hold the nodes.
    """
    if not look.job.spec.suspend and not is_suspending(look.status):
        return None
    look = _with_ends(with_data(look))  # their pods may be gone when the job is resumed
    left = tuple(pod for pod in look.observed.pods if not _given_up(look, pod))
    if left or _fetching(look):
        return _suspending(look, left)
    return _suspended(look) if look.job.spec.suspend else None


def is_suspending(status: DDPJobStatus) -> bool:
    """Whether the pods have been asked to stop for a suspension, and are not known to be gone."""
    found = cond.find(status.conditions, cond.SUSPENDED)
    return found is not None and found.status == "False" and found.reason == SUSPENDING


def _suspending(look: Look, left: tuple[PodView, ...]) -> Plan:
    observed, status = look.observed, look.status
    # node rank 0 tells of the last snapshot at its end: `ends` releases a pod once that is on record
    stopped = (replace(action, release=False) for action in discard(look, observed.pods, grace_seconds=None))
    actions = (*stopped, *discard(look, _fetching_pod(look), grace_seconds=None))
    forcing = _until_forced(look)
    if status.phase is Phase.SUSPENDED:  # a pod that was not seen before, or that belongs to no attempt
        return Plan(_with_problem(look).status, actions, requeue_after=forcing)
    after = _with_problem(transitions.begin_suspension(look)).status
    event = Event("Normal", SUSPENDING, "stopping all pods after a snapshot")
    fetching = (observed.initializer,) if observed.initializer is not None else ()
    waits = [wait for pod in (*left, *fetching) if (wait := _seconds_to_give_up(look, pod)) is not None]
    return Plan(
        after,
        actions,
        status_first=True,
        requeue_after=soonest(*(wait for wait in waits if wait > 0), forcing),
        events=() if is_suspending(status) else (event,),
    )


def _suspended(look: Look) -> Plan:
    status, pods = look.status, look.observed.pods
    policy, forcing = look.job.spec.restart, _until_forced(look)
    # pods that are left are on nodes that may never confirm their end
    actions: tuple[Action, ...] = (*all_groups(look), *force_deletions((*pods, *_fetching_pod(look)), policy, look.now))
    if status.phase is Phase.SUSPENDED:
        return Plan(_with_problem(look).status, actions, requeue_after=forcing)
    message = "stopped; set spec.suspend to false to resume"
    if status.snapshot is not None:
        message += f" from the snapshot of step {status.snapshot.step}"
    if stuck := few([f"{pod.name} on {pod.node_name}" for pod in pods if pod.placed and not pod.ended]):
        message += f". These pods did not confirm their end, and may still run: {stuck}"
    after = _with_problem(transitions.suspend(look, message)).status
    event = Event("Normal", "Suspended", message)
    # the message names pods that are not seen any more once they are deleted by force
    return Plan(after, actions, status_first=True, requeue_after=forcing, events=(event,))


def _with_problem(look: Look) -> Look:
    """The look with what the API server refuses, such as to delete a pod, or an edit that cannot be followed."""
    problem = startup_problem(look, ()) or look.job.rejected_edit
    return transitions.recover(look) if problem is None else transitions.degrade(look, problem)


def _with_ends(look: Look) -> Look:
    """The look with what the pods of this attempt reported at their end.

    Also those that are given up: once a pod has ended, the kubelet deletes it with a grace of 0, and its
    deletionTimestamp moves back.
    """
    pods = [pod for pod in look.observed.pods if pod.attempt == look.status.attempt]
    status = with_final_report(look.status, last_report(pods), look.now)
    # the kubelet may have lost what node rank 0 said, and with live recovery that one may have left before the save
    for snapshot in last_snapshots(pods):
        status = with_snapshot(status, snapshot)
    return look.with_status(status)


def _given_up(look: Look, pod: PodView | InitializerView) -> bool:
    """Whether the pod's grace is over and its end is not confirmed: its node is gone, and may never confirm it."""
    wait = _seconds_to_give_up(look, pod)
    return wait is not None and wait <= 0


def _seconds_to_give_up(look: Look, pod: PodView | InitializerView) -> float | None:
    if not pod.deleting or pod.gone_by is None:
        return None
    return look.seconds_until(pod.gone_by) + SETTLE_SECONDS


def _fetching(look: Look) -> bool:
    pod = look.observed.initializer
    return pod is not None and not pod.ended and not _given_up(look, pod)


def _fetching_pod(look: Look) -> tuple[PodView, ...]:
    """The pod of the initializers, unless it has ended."""
    pod = look.observed.initializer
    return () if pod is None or pod.ended else (pod.as_pod(look.status.attempt),)


def _until_forced(look: Look) -> float | None:
    return until_forced((*look.observed.pods, *_fetching_pod(look)), look.job.spec.restart, look.now)
