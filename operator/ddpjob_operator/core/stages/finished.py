"""The end of a job: when it has succeeded, what its last look does, which pods stay by `cleanPodPolicy`, and when the
job itself is deleted.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.detect import Failure, Retry, cut_work, has_succeeded, last_report
from ddpjob_operator.core.failure.node_lost import force_deletions, until_forced
from ddpjob_operator.core.gang.children import all_groups, missing_policies
from ddpjob_operator.core.gang.members import RESTART_GRACE_SECONDS, done_and_gone, members, stop, with_node_counts
from ddpjob_operator.core.ledger.notification import is_pending
from ddpjob_operator.core.ledger.progress import with_failure, with_final_report, with_loss_status
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.bounds import BEYOND
from ddpjob_operator.core.stages import deadlines
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, CreateChild, DeleteJob, DeletePod, Event, Plan, soonest
from ddpjob_operator.core.values.job import few
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodPhase, PodView

NOTIFICATION_SECONDS = 600.0
"""For which a job that has ended stays until the notification of its end has an outcome."""


def has_finished(look: Look) -> bool:
    """Whether the gang has done what `successPolicy` asks of it."""
    done = _done(look)
    if look.job.spec.success_policy == "FirstNode" and 0 in done:
        return True
    return bool(done) and len(done | _empty_places(look)) == look.gang_size


def plan_succeeded(look: Look) -> Plan:
    pods = members(look)
    look = with_node_counts(look)
    report = last_report(pods)
    look = with_loss_status(look.with_status(with_final_report(look.status, report, look.now)), report)
    done, size = _done(look), look.gang_size
    if size == 1 or (look.job.spec.success_policy == "FirstNode" and 0 in done):
        nodes = "node rank 0"
    else:
        nodes = f"all {size} nodes" if len(done) == size else f"the {len(done)} of {size} nodes that were left"
    message = f"{nodes} finished; restarts: {look.status.restarts}"
    if (loss := cond.find(look.status.conditions, cond.LOSS_NOT_FINITE)) is not None and loss.status == "True":
        message += f"; {loss.message}"
    cut = few(cut_work(pods), separator="; ")
    if cut:
        message += f"; ended before it was done: {cut}"
    look = transitions.succeed(look, message)
    attempt = look.status.attempt
    old = tuple(pod for pod in look.observed.pods if pod.attempt != attempt)
    current = tuple(pod for pod in look.observed.pods if pod.attempt == attempt)
    deleted = clean_up(look, current)
    return Plan(
        look.status,
        (*stop(old, everything=True), *deleted),
        status_first=bool(deleted),  # those pods are the proof of it
        events=(Event("Warning" if cut else "Normal", "Succeeded", message),),
    )


def plan_failed(look: Look, reason: str, message: str) -> Plan:
    look = transitions.fail(look, reason, message)
    line = message.splitlines()[0] if message else reason
    deleted = clean_up(look, look.observed.pods)
    return Plan(look.status, deleted, status_first=True, events=(Event("Warning", "Failed", line),))


def plan_refused(look: Look, refused: Refused) -> Plan:
    """The job is beyond a bound of the administrator's. That is on record as its last failure: what an attempt failed
    for before has another reason, and other advice.
    """
    message = "; ".join(refused.problems)
    return plan_failed(with_failure(look, Failure(BEYOND, message, Retry.NEVER)), BEYOND, message)


def plan_finished(look: Look) -> Plan:
    """What to do about a job that has Succeeded or Failed. Its status never changes again, but for the generation that
    it is of.
    """
    left = seconds_to_live(look)
    if left is not None and left <= 0:
        return Plan(look.status, (DeleteJob(look.job.uid),))
    unwanted, policy = clean_up(look, look.observed.pods), look.job.spec.restart
    deleted = {deletion.uid for deletion in unwanted}
    fetching = look.observed.initializer
    pods = look.observed.pods if fetching is None else (*look.observed.pods, fetching.as_pod(look.status.attempt))
    going = tuple(pod for pod in pods if pod.deleting or pod.uid in deleted)
    forced = force_deletions(going, policy, look.now)
    by_force = {deletion.uid for deletion in forced}
    asked = [deletion for deletion in unwanted if deletion.uid not in by_force]
    groups = all_groups(look) if all(pod.ended or pod.deleting for pod in look.observed.pods) else ()
    actions: tuple[Action, ...] = (
        *asked,
        *forced,
        *groups,
        *_initializer(look),
        *_protection(look, deleted | by_force),
    )
    return Plan(look.status, actions, requeue_after=soonest(left, until_forced(going, policy, look.now)))


def clean_up(look: Look, pods: tuple[PodView, ...]) -> tuple[DeletePod, ...]:
    """Those of `pods` that a job with this final status does not keep.

    A deadline stops what runs whatever the policy: that is what it is for. It leaves a pod the time to save a snapshot.
    Spares are deleted in any case, and a pod for an empty place that has not begun.
    """
    policy, late = look.job.spec.clean_pod_policy, _missed_a_deadline(look)
    if policy == "None" and not late:
        places = _empty_places(look)
        waits = (pod for pod in pods if pod.phase is PodPhase.PENDING and pod.node_rank in places)
        return stop((*(pod for pod in pods if pod.node_rank is None), *waits))
    deleted = stop(pods, everything=policy == "All", grace_seconds=None if late else RESTART_GRACE_SECONDS)
    return tuple(replace(deletion, unless_changed=policy != "All") for deletion in deleted)


def seconds_to_live(look: Look) -> float | None:
    """Seconds until a job that is over is to be deleted; None if it is to stay."""
    ttl, ended = look.job.spec.ttl_seconds_after_finished, look.status.completion_time
    if ttl is None or ended is None or not look.status.is_final:
        return None
    # the record that a notification is pending would go with the job
    least = NOTIFICATION_SECONDS if is_pending(look.status) else 0.0
    return look.seconds_until(ended + timedelta(seconds=max(ttl, least)))


def _done(look: Look) -> frozenset[int | None]:
    """Node ranks of the gang whose work is done."""
    return frozenset(pod.node_rank for pod in members(look) if has_succeeded(pod)) | done_and_gone(look)


def _empty_places(look: Look) -> frozenset[int | None]:
    """Node ranks that were lost while the others trained on, and whose replacement has not begun: it may wait for its
    name or for admission for ever, and has nothing left to do once the others are done.
    """
    begun = {pod.node_rank for pod in members(look) if pod.phase is not PodPhase.PENDING}
    return frozenset(look.status.internal.lost_pods.values()) - begun


def _initializer(look: Look) -> tuple[DeletePod, ...]:
    """The initializers' pod: stopped if it still runs, deleted with all others. A deadline stops it in any case."""
    pod, policy = look.observed.initializer, look.job.spec.clean_pod_policy
    if pod is None or pod.deleting or (policy == "None" and not _missed_a_deadline(look)):
        return ()
    return () if pod.ended and policy != "All" else (DeletePod(pod.name, pod.uid, RESTART_GRACE_SECONDS),)


def _protection(look: Look, deleted: set[str]) -> tuple[CreateChild, ...]:
    """The policies of pods that go on after the end of their job."""
    if look.defaults.network is None or not any(pod.running and pod.uid not in deleted for pod in look.observed.pods):
        return ()
    admitted = admission(look)
    return () if isinstance(admitted, Refused) else missing_policies(look, admitted)


def _missed_a_deadline(look: Look) -> bool:
    failed = cond.find(look.status.conditions, cond.FAILED)
    return failed is not None and failed.reason in deadlines.REASONS
