"""The decision: given one job and what was seen of its children, what should its status say and what should be done.

`plan` is a pure function of its arguments and level-triggered: it may be called at any time, any number of times,
after any crash. It reaches a fixed point in which the status stays as it is and no action is left.

The life of a job: Pending (Service and claim) → Starting (pods) → Running → Succeeded; a failure leads through
Restarting to the next attempt, or to Failed. A new attempt is first written into the status and only then acted on,
so that it is counted exactly once.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_operator.api.frozen import frozen_digests
from ddpjob_operator.api.status import Condition, DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.failures import Failure, find_failures, first_cause, has_succeeded, is_stopping, read_report
from ddpjob_operator.core.model import (
    Action,
    CreateClaim,
    CreatePod,
    CreateService,
    Defaults,
    DeletePod,
    Event,
    Job,
    Observed,
    Plan,
    PodPhase,
    PodView,
    PointService,
)
from ddpjob_operator.core.names import pod_name, service_name
from ddpjob_operator.core.pods import build_claim, build_pod, build_service, rendezvous_selector
from ddpjob_operator.core.progress import failure_status, with_final_report, with_report
from ddpjob_operator.core.restart import GiveUp, RestartIn, decide
from ddpjob_operator.core.trouble import TROUBLE_GRACE_SECONDS, find_trouble

RESTART_GRACE_SECONDS = 2
SETTLE_LOOK_SECONDS = 0.5


def plan(job: Job, observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """What to do about `job` now. `now` is an aware time; nothing else is read from a clock."""
    if job.deleting:
        return Plan(job.status)  # owner references clean up
    if job.status.phase is not None and job.status.phase.final:
        return Plan(job.status, actions=_stop(observed.pods))
    status = with_report(_adopted(job.status, observed), observed.report, job.uid, now)
    pods = tuple(pod for pod in observed.pods if pod.attempt == status.attempt)
    if status.phase in (None, Phase.PENDING) and _unprepared(job, observed):
        return _prepare(job, observed, status, now)
    if _edited_while_starting(job, status, pods):
        return _next_attempt(job, observed, status, now, defaults, delay=0.0, why="SpecChanged")

    failures = find_failures(pods, _missing(job, status, pods), now)
    if failures or any(is_stopping(pod, now) for pod in pods):
        stopping = any(is_stopping(pod, now) for pod in pods)
        cause = first_cause(failures, now, stopping=stopping)
        if cause is None:
            return Plan(status, requeue_after=SETTLE_LOOK_SECONDS)
        return _after_failure(job, observed, _counted(job, status, pods), cause, now, defaults)
    if len(pods) == _gang_size(job, status) and all(has_succeeded(pod) for pod in pods):
        return _succeeded(job, observed, status, pods, now)
    return _keep_going(job, observed, status, pods, now, defaults)


def _adopted(status: DDPJobStatus, observed: Observed) -> DDPJobStatus:
    """A status that was lost (restored from a backup, say) learns its attempt from the pods that are there.

    The attempts that it does not know of count as restarts: the budget is not refilled by a loss.
    """
    unknown = max((pod.attempt for pod in observed.pods), default=0) - status.attempt
    if unknown <= 0:
        return status
    return status.model_copy(update={"attempt": status.attempt + unknown, "restarts": status.restarts + unknown})


def _gang_size(job: Job, status: DDPJobStatus) -> int:
    """Nodes of the attempt in progress; a spec edited meanwhile does not change it."""
    return status.nodes.total or job.spec.nodes


def _missing(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...]) -> list[tuple[str, int]]:
    """Pods that were all there once, since the job is Running, and are gone."""
    if status.phase is not Phase.RUNNING:
        return []
    present = {pod.node_rank for pod in pods}
    return [
        (pod_name(job.name, status.attempt, node_rank), node_rank)
        for node_rank in range(_gang_size(job, status))
        if node_rank not in present
    ]


def _edited_while_starting(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...]) -> bool:
    """An incomplete gang must not be completed from another spec (a server with CEL refuses such an edit)."""
    incomplete = status.phase in (Phase.STARTING, Phase.RESTARTING) and len(pods) < _gang_size(job, status)
    return incomplete and bool(_edited_fields(job, status))


def _edited_fields(job: Job, status: DDPJobStatus) -> list[str]:
    started_with = status.spec_digests
    if started_with is None:
        return []
    return [name for name, digest in frozen_digests(job.spec).items() if started_with.get(name, digest) != digest]


def _unprepared(job: Job, observed: Observed) -> bool:
    return observed.service is None or (job.spec.shared.claim_name is None and not observed.claim_exists)


def _prepare(job: Job, observed: Observed, status: DDPJobStatus, now: datetime) -> Plan:
    """The Service's address goes into every pod, so it comes first; the claim is made beside it."""
    actions: list[Action] = []
    if observed.service is None:
        actions.append(CreateService(build_service(job, status.attempt)))
    claim = build_claim(job)
    if claim is not None and not observed.claim_exists:
        actions.append(CreateClaim(claim))
    if observed.problem is None:
        return Plan(status, tuple(actions))
    status = status.model_copy(update={"phase": Phase.PENDING, "start_time": status.start_time or now})
    return Plan(_degraded(job, status, observed.problem.reason, observed.problem.message, now), tuple(actions))


def _keep_going(
    job: Job,
    observed: Observed,
    status: DDPJobStatus,
    pods: tuple[PodView, ...],
    now: datetime,
    defaults: Defaults,
) -> Plan:
    """No failure: make what is missing, remove what is left of older attempts, say how far the gang has come."""
    stale = _stop(tuple(pod for pod in observed.pods if pod.attempt < status.attempt), everything=True)
    wait = _backoff_left(job, status, now)
    if wait > 0 and not pods:
        return Plan(_counted(job, status, pods), stale, requeue_after=wait)
    if status.phase is not Phase.RUNNING and observed.service is None:
        # even if every pod is there: whether it selects this attempt has to be looked at
        return Plan(status, (*stale, CreateService(build_service(job, status.attempt))))

    create = _create_missing(job, observed, status, pods, defaults) if status.phase is not Phase.RUNNING else ()
    after, events = _advanced(job, status, pods, now)
    after = _with_trouble(job, observed, after, pods, now)
    return Plan(
        after,
        (*stale, *create),
        # the digests of the spec must be on record before any pod is made from it
        status_first=status.phase in (None, Phase.PENDING),
        requeue_after=TROUBLE_GRACE_SECONDS if after.phase is not Phase.RUNNING else None,
        events=events,
    )


def _backoff_left(job: Job, status: DDPJobStatus, now: datetime) -> float:
    """Seconds until the next attempt may start. More than any backoff means that the clock was set back."""
    if status.restart_at is None:
        return 0.0
    left = (status.restart_at - now).total_seconds()
    return left if left <= job.spec.restart.backoff.max_seconds else 0.0


def _create_missing(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], defaults: Defaults
) -> tuple[Action, ...]:
    service, present = observed.service, {pod.node_rank for pod in pods}
    if service is None:
        return ()
    actions: list[Action] = []
    if service.attempt != status.attempt:
        actions.append(_point_service(job, status.attempt))
    actions += [
        CreatePod(
            pod_name(job.name, status.attempt, node_rank),
            status.attempt,
            node_rank,
            build_pod(job, status.attempt, node_rank, service, defaults),
        )
        for node_rank in range(_gang_size(job, status))
        if node_rank not in present
    ]
    return tuple(actions)


def _point_service(job: Job, attempt: int) -> PointService:
    return PointService(service_name(job.name), attempt, rendezvous_selector(job, attempt))


def _advanced(
    job: Job, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime
) -> tuple[DDPJobStatus, tuple[Event, ...]]:
    """The phase that follows from the pods that are there."""
    status = _counted(job, status, pods)
    if status.phase in (None, Phase.PENDING):
        status = status.model_copy(
            update={
                "phase": Phase.STARTING,
                "start_time": status.start_time or now,
                "observed_generation": job.generation,
                "spec_digests": frozen_digests(job.spec),
            }
        )
        event = Event("Normal", "Starting", f"creating {job.spec.nodes} nodes")
        return status, (event,)
    if status.phase is not Phase.RUNNING and status.nodes.ready == status.nodes.total:
        message = f"all {len(pods)} nodes run, attempt {status.attempt}"
        status = status.model_copy(
            update={
                "phase": Phase.RUNNING,
                "restart_at": None,
                "conditions": _conditions(job, status, now, running=("GangRunning", message)),
            }
        )
        return status, (Event("Normal", "Running", message),)
    return status, ()


def _counted(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...]) -> DDPJobStatus:
    """How many nodes are ready. The edge writes it along with the next change: alone it is not worth a write."""
    total = _gang_size(job, status)
    ready = sum(has_succeeded(pod) or (pod.phase is PodPhase.RUNNING and not pod.deleting) for pod in pods)
    count = NodeCount(ready=ready, total=total, summary=f"{ready}/{total}")
    return status.model_copy(update={"nodes": count})


def _with_trouble(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime
) -> DDPJobStatus:
    status = status.model_copy(update={"observed_generation": job.generation})
    edited = _edited_fields(job, status)
    if edited:
        names = ", ".join(f"spec.{name}" for name in edited)
        message = (
            f"{names} changed while the job runs; attempt {status.attempt} goes on as it was started, and a later "
            "attempt would use the new spec. Revert the edit, or delete the job and apply it again"
        )
        return _degraded(job, status, "SpecChanged", message, now)
    trouble = find_trouble(status, pods, observed.problem, now)
    if trouble is not None:
        return _degraded(job, status, trouble.reason, trouble.message, now)
    cleared = cond.set_condition(
        status.conditions, cond.DEGRADED, False, "AsExpected", "", now=now, generation=job.generation
    )
    return status.model_copy(update={"conditions": cleared})


def _degraded(job: Job, status: DDPJobStatus, reason: str, message: str, now: datetime) -> DDPJobStatus:
    after = cond.set_condition(
        status.conditions, cond.DEGRADED, True, reason, message, now=now, generation=job.generation
    )
    return status.model_copy(update={"conditions": after})


def _after_failure(
    job: Job, observed: Observed, status: DDPJobStatus, cause: Failure, now: datetime, defaults: Defaults
) -> Plan:
    status = with_final_report(status, cause.report, now)
    verdict = decide(job.spec.restart, status, cause)
    status = status.model_copy(update={"last_failure": failure_status(status, cause, now)})
    match verdict:
        case GiveUp(reason, message):
            return _failed(job, observed, status, reason, message, now)
        case RestartIn(seconds, in_a_row):
            counted = status.model_copy(update={"restarts": status.restarts + 1, "restarts_since_progress": in_a_row})
            return _next_attempt(
                job, observed, counted, now, defaults, delay=seconds, why=cause.reason, message=cause.message
            )


def _next_attempt(
    job: Job,
    observed: Observed,
    status: DDPJobStatus,
    now: datetime,
    defaults: Defaults,
    *,
    delay: float,
    why: str,
    message: str = "",
) -> Plan:
    """Replace the whole gang.

    The status goes first: from then on the old attempt is fenced, whatever happens to this process.
    """
    attempt = status.attempt + 1
    said = f"attempt {status.attempt} ended: {message or why}"
    after = status.model_copy(
        update={
            "phase": Phase.RESTARTING,
            "attempt": attempt,
            "restart_at": now + timedelta(seconds=delay) if delay else None,
            "nodes": NodeCount(ready=0, total=job.spec.nodes, summary=f"0/{job.spec.nodes}"),
            "observed_generation": job.generation,
            "spec_digests": frozen_digests(job.spec),
            "conditions": _conditions(job, status, now, restarting=(why, said)),
        }
    )
    actions: list[Action] = [*_stop(observed.pods, everything=True)]
    if not delay:
        actions += _create_missing(job, observed, after, (), defaults)
    event = Event("Warning", "Restarting", f"{said.splitlines()[0]}; starting attempt {attempt}")
    return Plan(
        after,
        tuple(actions),
        status_first=True,
        requeue_after=delay or (None if observed.service else 0.0),
        events=(event,),
    )


def _succeeded(job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime) -> Plan:
    status = with_final_report(_counted(job, status, pods), _report_of_first_node(pods), now)
    message = f"all {len(pods)} nodes finished; restarts: {status.restarts}"
    after = status.model_copy(
        update={
            "phase": Phase.SUCCEEDED,
            "completion_time": now,
            "restart_at": None,
            "conditions": _conditions(job, status, now, complete=("Completed", message)),
        }
    )
    old = tuple(pod for pod in observed.pods if pod.attempt != status.attempt)
    return Plan(after, _stop(old, everything=True), events=(Event("Normal", "Succeeded", message),))


def _report_of_first_node(pods: tuple[PodView, ...]) -> dict[str, object] | None:
    first = next((pod for pod in pods if pod.node_rank == 0), None)
    return read_report(first.termination.message) if first and first.termination else None


def _failed(job: Job, observed: Observed, status: DDPJobStatus, reason: str, message: str, now: datetime) -> Plan:
    after = status.model_copy(
        update={
            "phase": Phase.FAILED,
            "completion_time": now,
            "restart_at": None,
            "conditions": _conditions(job, status, now, failed=(reason, message)),
        }
    )
    line = message.splitlines()[0] if message else reason
    return Plan(after, _stop(observed.pods), status_first=True, events=(Event("Warning", "Failed", line),))


def _stop(pods: tuple[PodView, ...], *, everything: bool = False) -> tuple[DeletePod, ...]:
    """Delete what still runs; with `everything`, what has ended too."""
    ended = (PodPhase.SUCCEEDED, PodPhase.FAILED)
    return tuple(
        DeletePod(pod.name, pod.uid, RESTART_GRACE_SECONDS)
        for pod in pods
        if not pod.deleting and (everything or pod.phase not in ended)
    )


def _conditions(
    job: Job,
    status: DDPJobStatus,
    now: datetime,
    *,
    running: tuple[str, str] | None = None,
    restarting: tuple[str, str] | None = None,
    complete: tuple[str, str] | None = None,
    failed: tuple[str, str] | None = None,
) -> tuple[Condition, ...]:
    """Exactly one of the four holds; the others, where they were ever said, become False for the same reason."""
    said = running or restarting or complete or failed or ("", "")
    after = status.conditions
    for type_, what in (
        (cond.RUNNING, running),
        (cond.RESTARTING, restarting),
        (cond.COMPLETE, complete),
        (cond.FAILED, failed),
    ):
        reason, message = what or (said[0], "")
        after = cond.set_condition(after, type_, what is not None, reason, message, now=now, generation=job.generation)
    if not running:  # what kept this attempt from running is over; a running one is looked at by `_with_trouble`
        after = cond.set_condition(after, cond.DEGRADED, False, "AsExpected", "", now=now, generation=job.generation)
    return after
