"""The gang as it is: which pods make it up, which are missing, and the actions that complete, redirect or stop it."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.failure.detect import has_succeeded
from ddpjob_operator.core.failure.node_exclusion import preferring_others, unwelcome
from ddpjob_operator.core.failure.node_lost import removed
from ddpjob_operator.core.gang.in_place import WAITS, can_live_on, ended_before
from ddpjob_operator.core.manifests.pods import build_pod, rendezvous_selector
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, AssignPod, CreatePod, DeletePod, PointService
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.names import LABEL_UID, pod_name, service_name
from ddpjob_operator.core.values.observed import Observed, PodView, ServiceView

RESTART_GRACE_SECONDS = 2


def gang_size(job: Job, status: DDPJobStatus) -> int:
    """Nodes of the attempt in progress; a spec edited since its pods were first made does not change it."""
    return (status.nodes.total if status.spec_digests is not None else 0) or job.spec.nodes


def awaits_data(job: Job, status: DDPJobStatus) -> bool:
    """Whether initializers have to put data on the volume before anything of the gang is made."""
    running = status.phase is Phase.RUNNING
    return bool(job.spec.initializers) and not running and not cond.holds(status.conditions, cond.INITIALIZED)


def gang_of(observed: Observed, status: DDPJobStatus) -> tuple[PodView, ...]:
    """The pods that have a place in the current attempt."""
    return tuple(pod for pod in observed.pods if pod.attempt == status.attempt and pod.node_rank is not None)


def missing(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...]) -> list[tuple[str, int]]:
    """Pods that were all there once, since the job is Running, and are gone."""
    if status.phase is not Phase.RUNNING:
        return []
    present = {pod.node_rank for pod in pods}
    kept = {node_rank: name for name, node_rank in status.kept_pods.items()}
    return [
        (kept.get(node_rank) or pod_name(job.name, status.attempt, node_rank), node_rank)
        for node_rank in range(gang_size(job, status))
        if node_rank not in present
    ]


def counted(
    job: Job, status: DDPJobStatus, pods: tuple[PodView, ...], waiting: tuple[PodView, ...] = ()
) -> DDPJobStatus:
    """How many nodes are ready, and how many more wait.

    The edge writes it along with the next change: alone it is not worth a write.
    """
    total = gang_size(job, status)
    ready = sum(has_succeeded(pod) or (pod.running and not pod.deleting) for pod in pods)
    count = NodeCount(ready=ready, total=total, spares=len(waiting))
    return status.model_copy(update={"nodes": count})


def complete(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], defaults: Defaults
) -> tuple[Action, ...]:
    """What the gang lacks, `pods` being there: pods that are kept are told their place, the others are made."""
    service, present = observed.service, {pod.node_rank for pod in pods}
    if service is None or awaits_data(job, status):
        return ()
    actions: list[Action] = []
    if service.attempt != status.attempt:
        actions.append(_point_service(job, status.attempt))
    attempt, size = status.attempt, gang_size(job, status)
    kept = {status.kept_pods[pod.name]: pod for pod in observed.pods if is_called(pod, status)}
    for node_rank in range(size):
        if node_rank in present:
            continue
        if (pod := kept.get(node_rank)) is not None:
            actions.append(AssignPod(pod.name, pod.uid, attempt, node_rank, size))
        else:
            actions.append(creation(job, status, pod_name(job.name, attempt, node_rank), node_rank, service, defaults))
    return tuple(actions)


def creation(
    job: Job, status: DDPJobStatus, name: str, node_rank: int | None, service: ServiceView, defaults: Defaults
) -> CreatePod:
    """Make a pod for the current attempt, or (node rank None) one that waits."""
    attempt, size = status.attempt, gang_size(job, status)
    manifest = build_pod(job, attempt, node_rank, service, defaults, name=name, nodes=size, avoid=status.excluded_nodes)
    return CreatePod(name, attempt, node_rank, preferring_others(manifest, unwelcome(job.spec.restart, status)))


def is_kept(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod of an older attempt lives on into the current one."""
    return pod.name in status.kept_pods and pod.attempt < status.attempt and can_live_on(pod)


def is_called(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod that is kept has a node rank in the current attempt, of which it has not been told yet."""
    return is_kept(pod, status) and status.kept_pods[pod.name] != WAITS


def left_over(observed: Observed, status: DDPJobStatus) -> tuple[PodView, ...]:
    """Pods of older attempts that are not part of the current one."""
    return tuple(
        pod
        for pod in observed.pods
        if ended_before(pod, status) or (pod.attempt < status.attempt and not is_kept(pod, status))
    )


def discard(
    job: Job, pods: tuple[PodView, ...], now: datetime, *, grace_seconds: int | None = RESTART_GRACE_SECONDS
) -> tuple[DeletePod, ...]:
    """Delete pods that the job is done with, whatever state they are in."""
    forced = removed(pods, job.spec.restart, now)
    names = {action.name for action in forced}
    return (
        *forced,
        *stop(tuple(pod for pod in pods if pod.name not in names), everything=True, grace_seconds=grace_seconds),
    )


def selector(job: Job) -> str:
    """The job's pods as a label selector, which the scale subresource shows to an autoscaler."""
    return f"{LABEL_UID}={job.uid}"


def _point_service(job: Job, attempt: int) -> PointService:
    return PointService(service_name(job.name), attempt, rendezvous_selector(job, attempt))


def stop(
    pods: tuple[PodView, ...], *, everything: bool = False, grace_seconds: int | None = RESTART_GRACE_SECONDS
) -> tuple[DeletePod, ...]:
    """Delete what still runs; with `everything`, what has ended too. A grace of None is the pod's own."""
    return tuple(
        DeletePod(pod.name, pod.uid, grace_seconds)
        for pod in pods
        if not pod.deleting and (everything or not pod.ended)
    )


def asking_since(status: DDPJobStatus) -> datetime | None:
    """When the attempt began to ask for nodes, or will."""
    times = (status.attempt_time, status.restart_at, status.retry_at)
    return max((time for time in times if time is not None), default=None)
