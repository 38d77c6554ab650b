"""Every change of a job's phase, attempt, conditions and recorded spec: one function a transition, and no other place.

A transition says what the status becomes, and decides nothing: `core.stages` decides which one follows. Each takes the
look at the job and gives it back with the new status.

The phases: Pending → Starting → Running → Succeeded. A failure leads through Restarting to the next attempt, or to
Failed. Suspended lies between two attempts. Succeeded and Failed are final.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ddpjob_operator.api.status import Condition, DDPJobStatus, FailureStatus, Internal, NodeCount, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.changes import transitioned, with_gang_record, with_generation, with_replacements
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import LABEL_UID
from ddpjob_operator.core.values.observed import PodPhase

SUSPENDING = "Suspending"
"""Reason of the condition Suspended while it is False and the pods end."""

INVALID_SPEC = "InvalidSpec"

_OF_PHASES = (cond.RUNNING, cond.RESTARTING, cond.SUSPENDED, cond.COMPLETE, cond.FAILED)
"""Conditions of which exactly one holds; the others, where they were ever written, are False for the same reason."""

MOST_ATTEMPTS = 10**8
"""A label with this attempt or a later one is forged."""


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """What the next attempt is made of, and why it begins."""

    size: int
    reason: str
    message: str
    spec_digests: dict[str, str]
    delay: float = 0.0
    """Seconds until it may start."""
    kept_pods: dict[str, int] = field(default_factory=dict)
    """Pods of older attempts that take part, and their node ranks."""
    after: int = 0
    """An attempt that there has been, whatever the status says."""


def adopt_attempt(look: Look) -> Look:
    """A status that was lost (restored from a backup, say) takes its attempt from the pods that are there.

    Only where no attempt is on record: what labels say is then all there is to know. The attempts that it does not know
    of count as restarts: the budget is not refilled by a loss. Pods of a gang of another size than the spec asks for,
    such as an elastic one that trained with fewer nodes, cannot be completed to one of that size, so the attempt after
    theirs begins.
    """
    status = look.status
    if status.phase is not None or status.attempt or status.internal.spec_digests is not None:
        return look
    newest = max(_attempts(look), default=0)
    if newest >= 0 and _has_other_size(look, newest):
        newest += 1
    if newest <= 0:
        return look
    return look.with_status(
        transitioned(
            status,
            attempt=newest,
            restarts=status.restarts + newest,
            restarts_since_progress=status.restarts_since_progress + newest,
        )
    )


def _has_other_size(look: Look, attempt: int) -> bool:
    """Whether a pod of `attempt` has a node rank beyond the size of the spec, or is of a gang of another size. That
    does not count where the job has succeeded with its first node.
    """
    size, only_first = look.job.spec.nodes, look.job.spec.success_policy == "FirstNode"
    pods = [pod for pod in look.observed.pods if pod.attempt == attempt and pod.node_rank is not None]
    if only_first and any(pod.node_rank == 0 and pod.phase is PodPhase.SUCCEEDED for pod in pods):
        return False
    return any((pod.node_rank or 0) >= size or pod.nodes not in (None, size) for pod in pods)


def begin(look: Look) -> Look:
    """The operator acts on the job for the first time."""
    status = look.status
    phase, start_time = status.phase or Phase.PENDING, status.start_time or look.now
    return look.with_status(transitioned(status, phase=phase, start_time=start_time))


def start_gang(look: Look, spec_digests: dict[str, str]) -> Look:
    """Pending → Starting: the first attempt begins."""
    status = look.status
    return look.with_status(
        transitioned(
            status,
            phase=Phase.STARTING,
            start_time=status.start_time or look.now,
            attempt_start_time=look.now,
            code_digest=look.job.code_digest,
            selector=_selector(look),
            observed_generation=look.job.generation,
            internal=_made_from(look, spec_digests, status.internal.kept_pods),
        )
    )


def mark_running(look: Look, message: str) -> Look:
    """Starting, Restarting → Running: every pod of the gang runs. What its backoff was stays on record: the ranks have
    still to meet, and the time for that begins after it.
    """
    conditions = _in_phase(look, cond.RUNNING, "GangRunning", message)
    return look.with_status(transitioned(look.status, phase=Phase.RUNNING, retry_at=None, conditions=conditions))


def record_success(look: Look, node_ranks: Iterable[int]) -> Look:
    """Nodes of the current attempt have succeeded, and their pods may vanish."""
    nodes = tuple(sorted({*look.status.internal.succeeded_nodes, *node_ranks}))
    return look.with_status(with_gang_record(look.status, succeeded_nodes=nodes))


def replace_lost(look: Look, lost_pods: dict[str, int], kept_pods: dict[str, int] | None = None) -> Look:
    """In the same attempt and phase: these pods, by uid, are no part of the gang any more, and replaced; by spares
    where `kept_pods`, by name, has such.
    """
    kept = look.status.internal.kept_pods if kept_pods is None else kept_pods
    return look.with_status(with_replacements(look.status, lost_pods, kept))


def avoid_nodes(look: Look, nodes: tuple[str, ...]) -> Look:
    """In the same attempt and phase: the pods that are created next keep away from these nodes."""
    return look.with_status(with_gang_record(look.status, avoided_nodes=nodes))


def reopen_gang(look: Look, message: str) -> Look:
    """Running → Restarting, in the same attempt: a pod that was kept for it had ended before."""
    conditions = _in_phase(look, cond.RESTARTING, "KeptPodEnded", message)
    return look.with_status(transitioned(look.status, phase=Phase.RESTARTING, conditions=conditions))


def begin_attempt(look: Look, following: NextAttempt) -> Look:
    """→ Restarting: the attempt is over, the next one begins."""
    delay, size = following.delay, following.size
    return look.with_status(
        transitioned(
            look.status,
            phase=Phase.RESTARTING,
            attempt=max(_next_number(look), following.after + 1),
            attempt_start_time=look.now,
            restart_at=look.now + timedelta(seconds=delay) if delay else None,
            retry_at=None,
            nodes=_none_of(size),
            code_digest=look.job.code_digest,
            selector=_selector(look),
            observed_generation=look.job.generation,
            internal=_made_from(look, following.spec_digests, following.kept_pods),
            conditions=_in_phase(look, cond.RESTARTING, following.reason, following.message),
        )
    )


def release_gang(look: Look, following: NextAttempt) -> Look:
    """A gang that cannot be completed is given up: the next attempt begins, in the same phase, after a wait."""
    degraded = degrade(look, Problem(following.reason, following.message)).status
    return look.with_status(
        transitioned(
            degraded,
            attempt=_next_number(look),
            retry_at=look.now + timedelta(seconds=following.delay),
            nodes=_none_of(following.size),
            code_digest=look.job.code_digest,
            observed_generation=look.job.generation,
            internal=_made_from(look, following.spec_digests, following.kept_pods),
        )
    )


def retry_initializers(look: Look, delay: float) -> Look:
    """The initializers are tried again, `delay` seconds from now."""
    return look.with_status(transitioned(look.status, retry_at=look.now + timedelta(seconds=delay)))


def begin_suspension(look: Look) -> Look:
    """The pods are asked to stop. On record before they are, so that their end is never taken for a failure."""
    status, internal = look.status, look.status.internal
    # a gang of which there is no record goes on with a new attempt
    unknown: dict[str, str] | None = {} if look.observed.pods else None
    digests = unknown if internal.spec_digests is None else internal.spec_digests
    update = cond.Update(
        cond.SUSPENDED, False, SUSPENDING, "pods are saving a snapshot and terminating", write_false=True
    )
    return look.with_status(
        transitioned(
            status,
            internal=_made_from(look, digests, internal.kept_pods, internal.succeeded_nodes),
            conditions=_conditions(look, update),
        )
    )


def suspend(look: Look, message: str) -> Look:
    """→ Suspended: no pod is left, or none that confirms its end."""
    return look.with_status(
        transitioned(
            look.status,
            phase=Phase.SUSPENDED,
            restart_at=None,
            retry_at=None,
            start_time=look.status.start_time or look.now,
            observed_generation=look.job.generation,
            nodes=_none_of(look.gang_size),
            conditions=_in_phase(look, cond.SUSPENDED, "Suspended", message),
        )
    )


def resume(look: Look) -> Look:
    """A suspension is over. A job that never had a gang is Pending, as a new one is; another needs a new attempt."""
    status = look.status
    suspended = status.suspended_seconds + _suspended_for(look)
    conditions = _conditions(look, cond.Update(cond.SUSPENDED, False, "Resumed"))
    if has_had_gang(status):
        return look.with_status(transitioned(status, conditions=conditions, suspended_seconds=suspended))
    return look.with_status(
        transitioned(
            status,
            phase=Phase.PENDING,
            attempt_start_time=look.now,
            nodes=NodeCount(),
            conditions=conditions,
            suspended_seconds=suspended,
        )
    )


def has_had_gang(status: DDPJobStatus) -> bool:
    """Whether an attempt has begun. An operator of another version may have kept the record of its pods elsewhere,
    which this CRD prunes.
    """
    reported = status.progress is not None or status.snapshot is not None
    return status.internal.spec_digests is not None or status.attempt > 0 or reported


def is_under_way(status: DDPJobStatus) -> bool:
    """Whether the job has begun: a gang, or the pod of its initializers. It is not ended for an edit."""
    # a phase that this version cannot read is None
    begun = has_had_gang(status) if status.phase is None else status.phase is not Phase.PENDING
    return begun or cond.find(status.conditions, cond.INITIALIZED) is not None


def succeed(look: Look, message: str) -> Look:
    """→ Succeeded."""
    return _end(look, Phase.SUCCEEDED, _in_phase(look, cond.COMPLETE, "Completed", message))


def fail(look: Look, reason: str, message: str) -> Look:
    """→ Failed."""
    return _end(look, Phase.FAILED, _in_phase(look, cond.FAILED, reason, message))


def refuse_spec(status: DDPJobStatus, message: str, now: datetime, generation: int) -> DDPJobStatus:
    """A spec that cannot be parsed: Failed, unless the job is under way, which goes on (Degraded)."""
    if is_under_way(status):
        return _degraded_without_look(status, Problem(INVALID_SPEC, message), now, generation)
    failed = cond.Update(cond.FAILED, True, INVALID_SPEC, message)
    return transitioned(
        status,
        phase=Phase.FAILED,
        completion_time=now,
        observed_generation=generation,
        conditions=cond.set_condition(status.conditions, failed, now, generation),
        last_failure=FailureStatus(
            attempt=status.attempt,
            time=now,
            reason=INVALID_SPEC,
            message=message,
            advice="Correct the spec, delete the job and apply it again: no edit starts one that has ended.",
        ),
    )


def report_internal_error(status: DDPJobStatus, message: str, now: datetime, generation: int) -> DDPJobStatus:
    """The operator itself failed on this job."""
    return _degraded_without_look(status, Problem("InternalError", message), now, generation)


def observed(status: DDPJobStatus, generation: int) -> DDPJobStatus:
    """`status` as decided from this generation of the spec. `kubectl wait` takes no condition for met that is of an
    older one, and Flux no object for settled. Of a job that nothing was decided on yet there is nothing to write.
    """
    current = all(condition.observed_generation == generation for condition in status.conditions)
    if current and (status.observed_generation == generation or status.phase is None):
        return status
    return with_generation(status, generation)


def degrade(look: Look, problem: Problem) -> Look:
    """Something is wrong, and the job goes on."""
    return _with_condition(look, cond.Update(cond.DEGRADED, True, problem.reason, problem.message))


def recover(look: Look) -> Look:
    """Nothing is wrong any more."""
    return _with_condition(look, cond.Update(cond.DEGRADED, False, "AsExpected"))


def mark_scheduled(look: Look) -> Look:
    return _with_condition(look, cond.Update(cond.SCHEDULED, True, "AllScheduled", "every pod has a node"))


def mark_unscheduled(look: Look, problem: Problem | None) -> Look:
    """Some pod has no node; `problem` is why, if it is known."""
    if problem is None:
        return _with_condition(look, cond.Update(cond.SCHEDULED, False, "Scheduling"))
    return _with_condition(look, cond.Update(cond.SCHEDULED, False, problem.reason, problem.message, write_false=True))


def mark_initialized(look: Look, message: str) -> Look:
    return _with_condition(look, cond.Update(cond.INITIALIZED, True, "DataReady", message))


def mark_uninitialized(look: Look, reason: str, message: str) -> Look:
    return _with_condition(look, cond.Update(cond.INITIALIZED, False, reason, message, write_false=True))


def mark_snapshots_failing(look: Look, message: str) -> Look:
    return _with_condition(look, cond.Update(cond.SNAPSHOTS_FAILING, True, "SavesFail", message))


def mark_snapshots_saved(look: Look) -> Look:
    return _with_condition(look, cond.Update(cond.SNAPSHOTS_FAILING, False, "Saved"))


def mark_shutdown_too_short(look: Look, message: str) -> Look:
    return _with_condition(look, cond.Update(cond.SHUTDOWN_TOO_SHORT, True, "SaveTakesLonger", message))


def mark_shutdown_long_enough(look: Look) -> Look:
    return _with_condition(look, cond.Update(cond.SHUTDOWN_TOO_SHORT, False, "SaveFits"))


def mark_loss_not_finite(look: Look, message: str) -> Look:
    return _with_condition(look, cond.Update(cond.LOSS_NOT_FINITE, True, "NonFiniteLoss", message))


def mark_loss_finite(look: Look) -> Look:
    return _with_condition(look, cond.Update(cond.LOSS_NOT_FINITE, False, "FiniteLoss"))


def _next_number(look: Look) -> int:
    """Of the next attempt: greater than that of any pod, since a volume refuses a lower one (decision 0002)."""
    return max((look.status.attempt, *_attempts(look))) + 1


def _attempts(look: Look) -> tuple[int, ...]:
    """Of the pods, without numbers that no job reaches: a label of nine digits would lead to an attempt of ten, whose
    pods are not recognised as a gang's."""
    return tuple(pod.attempt for pod in look.observed.pods if pod.attempt < MOST_ATTEMPTS)


def _end(look: Look, phase: Phase, conditions: tuple[Condition, ...]) -> Look:
    return look.with_status(
        transitioned(
            look.status,
            phase=phase,
            completion_time=look.now,
            restart_at=None,
            retry_at=None,
            conditions=conditions,
        )
    )


def _with_condition(look: Look, update: cond.Update) -> Look:
    return look.with_status(transitioned(look.status, conditions=_conditions(look, update)))


def _conditions(look: Look, *updates: cond.Update) -> tuple[Condition, ...]:
    conditions = look.status.conditions
    for update in updates:
        conditions = cond.set_condition(conditions, update, look.now, look.job.generation)
    return conditions


def _in_phase(look: Look, type_: str, reason: str, message: str) -> tuple[Condition, ...]:
    """The conditions of a phase that the condition `type_` stands for."""
    updates = [cond.Update(other, other == type_, reason, message if other == type_ else "") for other in _OF_PHASES]
    if type_ == cond.RUNNING:
        updates.append(cond.Update(cond.SCHEDULED, True, "AllScheduled", "every pod has a node"))
    elif type_ in (cond.RESTARTING, cond.SUSPENDED):
        updates.append(cond.Update(cond.SCHEDULED, False, reason))
    if type_ != cond.RUNNING:  # what kept this attempt from running is over; `gang.problems` looks at one that runs
        updates.append(cond.Update(cond.DEGRADED, False, "AsExpected"))
    return _conditions(look, *updates)


def _degraded_without_look(status: DDPJobStatus, problem: Problem, now: datetime, generation: int) -> DDPJobStatus:
    update = cond.Update(cond.DEGRADED, True, problem.reason, problem.message)
    return transitioned(status, conditions=cond.set_condition(status.conditions, update, now, generation))


def _made_from(
    look: Look, spec_digests: dict[str, str] | None, kept_pods: dict[str, int], succeeded: tuple[int, ...] = ()
) -> Internal:
    """What is on record of the pods of an attempt. None of a new one has succeeded."""
    known = look.status.internal
    return Internal(
        spec_digests=spec_digests,
        kept_pods=kept_pods,
        succeeded_nodes=succeeded,
        rule_excluded_nodes=known.rule_excluded_nodes,
        node_names_refused=known.node_names_refused,
        initializer_disruptions=known.initializer_disruptions,
        refunded_restarts=known.refunded_restarts,
        reported_seconds=known.reported_seconds,
        node_seconds=known.node_seconds,
        gpu_seconds=known.gpu_seconds,
        unresolved_steps=known.unresolved_steps,
    )


def _none_of(size: int) -> NodeCount:
    return NodeCount(ready=0, total=size)


def _selector(look: Look) -> str:
    """The job's pods as a label selector, which the scale subresource shows to an autoscaler."""
    return f"{LABEL_UID}={look.job.uid}"


def _suspended_for(look: Look) -> float:
    condition = cond.find(look.status.conditions, cond.SUSPENDED)
    if condition is None or condition.status != "True":
        return 0.0
    return max(0.0, round(look.seconds_since(condition.last_transition_time), 3))
