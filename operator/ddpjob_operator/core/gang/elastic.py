"""The size of an elastic gang: fewer nodes when not all can be scheduled, and all of them again when they can.

An attempt has one size, `status.nodes.total`. To change it is to begin another attempt, which costs no budget: at once
where the gang cannot start as it is, and else where a snapshot has just been saved. Pods that must go get the time to
save another. The trainer keeps the global batch whatever the size; which sizes divide it is the trainer's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.api.policies import Elastic
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.detect import is_stopping
from ddpjob_operator.core.gang.in_place import WAITS
from ddpjob_operator.core.gang.members import RESTART_GRACE_SECONDS, asking_since, gang_size, left_over
from ddpjob_operator.core.gang.spares import ready_waiting
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import Observed, PodView

SCALED_UP = "ScaledUp"
SCALED_DOWN = "ScaledDown"

SAVING_LOOK_SECONDS = 0.5
LEAST_WAIT_SECONDS = 2.0
"""A gang is never shrunk sooner than this: the scheduler places its pods one after the other."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Begin another attempt, of another size, for a reason that is no failure."""

    size: int
    reason: str
    message: str


def wanted_resize(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime
) -> Resize | None:
    """The size that the gang should have instead, if it should have another. `pods` are those of this attempt."""
    elastic, total = job.spec.elastic, gang_size(job, status)
    if elastic is None or _waits(status, now):
        return None
    if status.phase in (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING) and job.spec.nodes < total:
        return Resize(job.spec.nodes, SCALED_DOWN, f"spec.nodes is {job.spec.nodes} now, and was {total}")
    if status.phase in (Phase.STARTING, Phase.RESTARTING):
        return _shrunk(elastic, status, pods, total, now)
    if status.phase is Phase.RUNNING:
        return _grown(job, observed, status, total, now)
    return None


def next_size(job: Job, observed: Observed, status: DDPJobStatus) -> int:
    """Nodes of an attempt that follows a failure: as many as there were, and those that have come to wait since."""
    going_on = status.phase in (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING) and status.nodes.total > 0
    if job.spec.elastic is None or not going_on:
        return job.spec.nodes
    size = status.nodes.total + len(ready_waiting(observed))
    return max(job.spec.elastic.min_nodes, min(job.spec.nodes, size))


def is_resizing(status: DDPJobStatus) -> bool:
    """Whether the attempt that starts now has another size than the one before, and nothing failed."""
    restarting = cond.find(status.conditions, cond.RESTARTING)
    return restarting is not None and restarting.status == "True" and restarting.reason in (SCALED_UP, SCALED_DOWN)


def grace_of_old(status: DDPJobStatus) -> int | None:
    """How long pods of older attempts may take to end: to save a snapshot where nothing failed."""
    return None if is_resizing(status) else RESTART_GRACE_SECONDS


def still_saving(observed: Observed, status: DDPJobStatus, now: datetime) -> float:
    """Seconds after which to look again, while a gang that is replaced as a whole may save its last step; else 0.

    Its successor would take the volume away from it. In place nothing is waited for: pods that live on save before
    they take up their new place.
    """
    if not is_resizing(status) or any(node_rank != WAITS for node_rank in status.kept_pods.values()):
        return 0.0
    old = (pod for pod in left_over(observed, status) if pod.node_rank is not None and pod.not_ready_since is None)
    saving = any(is_stopping(pod, now) if pod.deleting else pod.running for pod in old)
    return SAVING_LOOK_SECONDS if saving else 0.0


def until_resized(job: Job, observed: Observed, status: DDPJobStatus, now: datetime) -> float | None:
    """Seconds until a wait for nodes or for a snapshot is over, and the gang may have to change; None if none is on."""
    elastic, waits = job.spec.elastic, []
    if elastic is None:
        return None
    if status.phase is Phase.RUNNING and job.spec.nodes > gang_size(job, status):
        waits = [elastic.wait_seconds - _waited(pod, now) for pod in ready_waiting(observed)]
    elif status.phase in (Phase.STARTING, Phase.RESTARTING) and (since := asking_since(status)) is not None:
        waits = [_patience(elastic) - (now - since).total_seconds()]
    return min((wait for wait in waits if wait > 0), default=None)


def _shrunk(
    elastic: Elastic, status: DDPJobStatus, pods: tuple[PodView, ...], total: int, now: datetime
) -> Resize | None:
    since = asking_since(status)
    if since is None or (now - since).total_seconds() < _patience(elastic):
        return None
    placed = sum(_holds_node(pod) for pod in pods)
    if not elastic.min_nodes <= placed < total:
        return None
    return Resize(placed, SCALED_DOWN, f"only {placed} of {total} nodes were scheduled within {elastic.wait_seconds} s")


def _grown(job: Job, observed: Observed, status: DDPJobStatus, total: int, now: datetime) -> Resize | None:
    usable = sum(_at_boundary(job, pod, status, now) for pod in ready_waiting(observed))
    size = min(job.spec.nodes, total + usable)
    return (
        Resize(size, SCALED_UP, f"{size - total} more are available than the {total} before") if size > total else None
    )


def _at_boundary(job: Job, pod: PodView, status: DDPJobStatus, now: datetime) -> bool:
    """Whether a snapshot was saved since the pod became ready, or it has waited for one for long enough."""
    elastic = job.spec.elastic
    saved = status.snapshot is not None and pod.ready_since is not None and status.snapshot.time > pod.ready_since
    return saved or (elastic is not None and _waited(pod, now) >= elastic.wait_seconds)


def _waited(pod: PodView, now: datetime) -> float:
    return (now - pod.ready_since).total_seconds() if pod.ready_since is not None else 0.0


def _holds_node(pod: PodView) -> bool:
    return pod.placed and not pod.deleting and pod.not_ready_since is None


def _patience(elastic: Elastic) -> float:
    return max(elastic.wait_seconds, LEAST_WAIT_SECONDS)


def _waits(status: DDPJobStatus, now: datetime) -> bool:
    """Whether the attempt has not begun to ask for nodes."""
    return any(time is not None and time > now for time in (status.restart_at, status.retry_at))
