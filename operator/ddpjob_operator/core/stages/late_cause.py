"""The cause of the last attempt's end where it shows late: the node of a pod was gone.

Survivors report a lost peer within seconds, Kubernetes a silent node after 40 to 50 s. By then the next attempt has
begun, and its restart was charged. The pod of the last attempt on that node does not confirm its deletion, which is a
sign within seconds, but none alone: a kubelet that lives may take as long to end a pod. Its node is marked, or does not
see another pod that was bound to it, or comes back without the containers.
"""

from __future__ import annotations

from datetime import timedelta

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus
from ddpjob_operator.core.failure.budget import refunded
from ddpjob_operator.core.failure.decide import remember, with_clause
from ddpjob_operator.core.failure.detect import CONSEQUENCES, NODE_LOST, Failure, Retry, end_of_restarted_node
from ddpjob_operator.core.failure.node_exclusion import blame_node
from ddpjob_operator.core.failure.node_lost import (
    KUBELET_SECONDS,
    Patience,
    gone_nodes,
    is_unconfirmed,
    lost_nodes,
    patience,
)
from ddpjob_operator.core.failure.restart_rules import rule_on
from ddpjob_operator.core.ledger.progress import failure_status
from ddpjob_operator.core.values.actions import Event, soonest
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView

_MAY_BE_CORRECTED = (*CONSEQUENCES, "PodDeleted")


def with_late_cause(look: Look) -> tuple[Look, tuple[Event, ...]]:
    """The look with the cause on record, if there is a sign of it now, and its restart refunded."""
    last = look.status.last_failure
    cause = _cause(look)
    if last is None or cause is None:
        return look, ()
    message = with_clause(cause.message, f"at first this was {last.reason}: {last.message.partition(chr(10))[0]}")
    status, charged = look.status, not rule_on(look.job.spec.restart, _as_failure(last)).explicit
    if charged and status.restarts > 0:
        status = refunded(status)
    status = blame_node(look.with_status(status), cause, exclude=False)
    return look.with_status(_rewritten(status, last, cause, message)), (Event("Normal", "CauseFound", message),)


def until_late_cause(look: Look) -> float | None:
    """Seconds until a deletion that is not confirmed is such a sign."""
    ends = (pod.gone_by for pod in _unconfirmed(look) if pod.gone_by is not None)
    waits = (look.seconds_until(end + timedelta(seconds=KUBELET_SECONDS)) for end in ends)
    return soonest(*(wait for wait in waits if wait > 0))


def _unconfirmed(look: Look) -> tuple[PodView, ...]:
    """Pods of the last attempt that are being deleted, if its end may have another cause than the one on record."""
    last = look.status.last_failure
    if last is None or last.reason not in _MAY_BE_CORRECTED or last.attempt != look.status.attempt - 1:
        return ()
    of_attempt = (pod for pod in look.observed.pods if pod.attempt == last.attempt and pod.deleting and pod.placed)
    return tuple(pod for pod in of_attempt if last.reason != "PodDeleted" or pod.name == last.pod_name)


def _cause(look: Look) -> Failure | None:
    if not (pods := _unconfirmed(look)):
        return None
    allowed, gone = patience(look), gone_nodes(look)  # each walks all pods
    return next((found for pod in pods if (found := _sign(look, pod, allowed, gone)) is not None), None)


def _sign(look: Look, pod: PodView, allowed: Patience, gone: frozenset[str]) -> Failure | None:
    if (restarted := end_of_restarted_node(pod)) is not None:
        return restarted
    if silent := lost_nodes((pod,), allowed, look.now):
        return silent[0]
    if not (is_unconfirmed(pod, look.now) and pod.node_name in gone):
        return None
    message = f"node {pod.node_name} does not confirm the deletion of pod {pod.name}"
    return Failure(NODE_LOST, message, Retry.YES, pod.name, pod.node_name, pod.node_rank, time=pod.gone_by)


def _as_failure(last: FailureStatus) -> Failure:
    return Failure(last.reason, last.message, Retry.YES, exit_code=last.exit_code, signal=last.signal)


def _rewritten(status: DDPJobStatus, last: FailureStatus, cause: Failure, message: str) -> DDPJobStatus:
    """What is known of steps and times stays: they are those of the first sign."""
    found = failure_status(status, cause, last.time, last.log_tail)
    corrected = found.model_validate(
        found.model_dump()
        | {"attempt": last.attempt, "message": message, "step": last.step, "snapshot_step": last.snapshot_step}
    )
    return recorded(status, last_failure=corrected, failures=remember(status.failures[:-1], corrected))
