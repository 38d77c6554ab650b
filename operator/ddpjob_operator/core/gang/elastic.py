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
from ddpjob_operator.core.failure.detect import has_succeeded, is_stopping
from ddpjob_operator.core.gang.members import (
    RESTART_GRACE_SECONDS,
    STAYS_SPARE,
    about_to_be_assigned,
    asking_since,
    done_and_gone,
    ends_of_waits,
    left_over,
    members,
)
from ddpjob_operator.core.gang.spares import idle_spares
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView

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


def wanted_resize(look: Look) -> Resize | None:
    """The size that the gang should have instead, if it should have another."""
    spec, status, total = look.job.spec, look.status, look.gang_size
    if spec.elastic is None or _is_backing_off(look) or _is_finishing(look):
        return None
    if status.phase in (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING) and spec.nodes < total:
        return Resize(spec.nodes, SCALED_DOWN, f"spec.nodes was changed from {total} to {spec.nodes}")
    if status.phase in (Phase.STARTING, Phase.RESTARTING):
        return _shrunk(look, spec.elastic)
    if status.phase is Phase.RUNNING:
        return _grown(look, spec.elastic)
    return None


def next_size(look: Look) -> int:
    """Nodes of an attempt that follows a failure: as many as there were, and the spares that are ready."""
    spec, status = look.job.spec, look.status
    active = status.phase in (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING) and status.nodes.total > 0
    if spec.elastic is None or not active:
        return spec.nodes
    return max(spec.elastic.min_nodes, min(spec.nodes, status.nodes.total + len(idle_spares(look))))


def is_resizing(status: DDPJobStatus) -> bool:
    """Whether the attempt that starts now has another size than the one before, and nothing failed."""
    restarting = cond.find(status.conditions, cond.RESTARTING)
    return restarting is not None and restarting.status == "True" and restarting.reason in (SCALED_UP, SCALED_DOWN)


def grace_of_old(status: DDPJobStatus) -> int | None:
    """How long pods of older attempts may take to end: to save a snapshot where nothing failed."""
    return None if is_resizing(status) else RESTART_GRACE_SECONDS


def still_saving(look: Look) -> float:
    """Seconds after which to look again, while a gang that is replaced as a whole may save its last step; else 0.

    Its successor would take the volume away from it. In place nothing is waited for: kept pods save before they take
    up their new place.
    """
    status = look.status
    if not is_resizing(status) or any(node_rank != STAYS_SPARE for node_rank in status.internal.kept_pods.values()):
        return 0.0
    old = (pod for pod in left_over(look) if pod.node_rank is not None and pod.not_ready_since is None)
    saving = any(is_stopping(pod, look.now) if pod.deleting else pod.running for pod in old)
    return SAVING_LOOK_SECONDS if saving else 0.0


def until_resized(look: Look) -> float | None:
    """Seconds until a wait for nodes or for a snapshot is over, and the gang may have to change; None if none is on."""
    elastic, status, waits = look.job.spec.elastic, look.status, []
    if elastic is None:
        return None
    if status.phase is Phase.RUNNING and look.job.spec.nodes > look.gang_size:
        waits = [elastic.wait_seconds - _waited(look, pod) for pod in idle_spares(look)]
    elif status.phase in (Phase.STARTING, Phase.RESTARTING) and (since := _nodes_awaited_since(look)) is not None:
        waits = [_patience(elastic) - look.seconds_since(since)]
    return min((wait for wait in waits if wait > 0), default=None)


def _shrunk(look: Look, elastic: Elastic) -> Resize | None:
    since, total = _nodes_awaited_since(look), look.gang_size
    if since is None or look.seconds_since(since) < _patience(elastic):
        return None
    placed = sum(_holds_node(pod) for pod in (*members(look), *about_to_be_assigned(look))) + len(done_and_gone(look))
    if not elastic.min_nodes <= placed < total:
        return None
    return Resize(placed, SCALED_DOWN, f"only {placed} of {total} nodes were scheduled within {elastic.wait_seconds} s")


def _nodes_awaited_since(look: Look) -> datetime | None:
    """From when on nodes could have been found: an attempt has no pods yet while the ones before it save."""
    waiting = [pod.created for pod in members(look) if not pod.placed and pod.created is not None]
    since = asking_since(look)
    return since if since is None or not waiting else max(since, min(waiting))


def _grown(look: Look, elastic: Elastic) -> Resize | None:
    total = look.gang_size
    usable = sum(_at_boundary(look, elastic, pod) for pod in idle_spares(look))
    size = min(look.job.spec.nodes, total + usable)
    if size <= total:
        return None
    return Resize(size, SCALED_UP, f"{size - total} more nodes are available")


def _at_boundary(look: Look, elastic: Elastic, pod: PodView) -> bool:
    """Whether a snapshot was saved since the pod became ready, or it has waited for one for long enough."""
    snapshot = look.status.snapshot
    saved = snapshot is not None and pod.ready_since is not None and snapshot.time > pod.ready_since
    return saved or _waited(look, pod) >= elastic.wait_seconds


def _waited(look: Look, pod: PodView) -> float:
    return look.seconds_since(pod.ready_since) if pod.ready_since is not None else 0.0


def _holds_node(pod: PodView) -> bool:
    return pod.placed and not pod.deleting and pod.not_ready_since is None


def _patience(elastic: Elastic) -> float:
    return max(elastic.wait_seconds, LEAST_WAIT_SECONDS)


def _is_finishing(look: Look) -> bool:
    """Whether a node of the gang that runs is done. Another attempt would cut off what the others still do, such as an
    upload, and train again; the node that was given back is no reason to grow.
    """
    if look.status.phase is not Phase.RUNNING:
        return False
    return bool(done_and_gone(look)) or any(has_succeeded(pod) for pod in members(look))


def _is_backing_off(look: Look) -> bool:
    """Whether the attempt has not begun to ask for nodes."""
    status = look.status
    if status.phase not in (Phase.STARTING, Phase.RESTARTING):
        return False  # the time of its last wait is still on record
    return any(end > look.now for end in ends_of_waits(look, status.restart_at, status.retry_at))
