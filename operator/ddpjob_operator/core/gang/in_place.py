"""Pods kept for the next attempt, and their node ranks (restart.scope InPlace).

A pod's place in the gang is a matter of its labels, which the kubelet shows to the pod as files (docs/contracts.md
section 2). So a healthy pod need not be replaced: its labels are patched, and its launcher restarts its ranks in
place. Nothing is scheduled or pulled again.

Which pods are kept is decided once, with the attempt, and written into the status (`internal.keptPods`) before any
label is patched. All other node ranks get new pods, whose names are unique. So no node rank of an attempt is ever
given to two pods, whatever the operator sees later, late or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.core.values.trainer_report import read_termination

STAYS_SPARE = -1
"""In place of a node rank: the pod is kept and remains a spare."""


def assign(survivors: Iterable[PodView], spares: Iterable[PodView], size: int) -> dict[str, int]:
    """The node ranks of a gang of `size`, by the names of the pods that take them; the ranks left over need new pods.

    A survivor keeps its rank where the gang still has it, and else takes the lowest one that is free, as a spare
    does. Survivors beyond `size` get none.
    """
    ranked = sorted((pod for pod in survivors if pod.node_rank is not None), key=lambda pod: (pod.node_rank, pod.name))
    kept: dict[int, str] = {}
    for pod in ranked:
        if pod.node_rank is not None and pod.node_rank < size:
            kept.setdefault(pod.node_rank, pod.name)
    placed = set(kept.values())
    homeless = [pod.name for pod in ranked if pod.name not in placed]
    homeless += sorted(pod.name for pod in spares)
    free = (rank for rank in range(size) if rank not in kept)
    return {name: rank for rank, name in kept.items()} | dict(zip(homeless, free, strict=False))


def can_be_kept(pod: PodView) -> bool:
    """Whether a pod may take part in the next attempt: it runs or is about to, and is not being deleted."""
    return not pod.deleting and (pod.running or (pod.phase is PodPhase.PENDING and pod.scheduled))


def ended_before(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod that was kept for the current attempt had ended before it joined it.

    Its end belongs to the attempt before, which has been counted. Only a kept pod can be such a one, and what takes
    its place is a new pod: a termination message that lies cannot make restarts free for ever.
    """
    if pod.termination is None or pod.name not in status.internal.kept_pods:
        return False
    said = read_termination(pod.termination.message)
    if said is not None and said.attempt is not None:
        return said.attempt < status.attempt
    return _before(pod.termination.finished_at, status.attempt_start_time)


def _before(moment: datetime | None, other: datetime | None) -> bool:
    return moment is not None and other is not None and moment < other
