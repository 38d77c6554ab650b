"""Pods kept for the next attempt, and their node ranks (restart.scope InPlace).

A pod's place in the gang is a matter of its labels, which the kubelet shows to the pod as files (docs/contracts.md
section 2). So a healthy pod need not be replaced: its labels are patched, and its launcher restarts its ranks in
place. Nothing is scheduled or pulled again.

Which pods are kept is decided once, with the attempt, and written into the status (`internal.keptPods`) before any
label is patched. All other node ranks get new pods, whose names are unique. So no node rank of an attempt is ever
given to two pods, whatever the operator sees later, late or not at all. `gang.members` reads what was decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from ddpjob_operator.core.failure.node_exclusion import barred
from ddpjob_operator.core.failure.node_lost import is_lost, patience
from ddpjob_operator.core.gang.group import takes_others
from ddpjob_operator.core.gang.members import STAYS_SPARE, asking_since, can_be_kept, members, starting_since
from ddpjob_operator.core.gang.spares import ready_spares
from ddpjob_operator.core.manifests.spec_changes import made_alike
from ddpjob_operator.core.values.actions import SyncPod, soonest
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView

SYNC_SECONDS: Final = (3.0, 8.0, 20.0)
"""After places were given. A kubelet usually shows a pod its new labels within a second. Sometimes (1 in 20
patches, with Kubernetes 1.20) it reads the old ones once more, and shows the new ones at its next sync, a minute later.
"""

LATEST_SYNC_SECONDS: Final = 60.0
"""After the last of these, kubelets have synced all pods anyway."""

JOINED: Final = ("load", "first_step", "train", "validate", "save", "done")
"""Phases of node rank 0 in which every pod knows its place: the ranks have met."""


def kept_pods(look: Look, size: int) -> dict[str, int]:
    """The pods that take part in the next attempt, of `size` nodes, and the node ranks that they have in it."""
    if look.job.spec.restart.scope == "Gang":
        return {}
    if not made_alike(look.job, look.status, look.defaults):
        return {}  # those that are there are not like those that would be made now

    allowed = patience(look)  # walks all pods

    def may_stay(pod: PodView) -> bool:
        return not is_lost(pod, allowed, look.now) and pod.node_name not in barred(look.status)

    survivors = [pod for pod in look.gang if can_be_kept(pod) and may_stay(pod)]
    spares = [pod for pod in ready_spares(look) if may_stay(pod)]
    ranked = assign(survivors, spares, size)
    if len(ranked) < size and look.job.spec.scheduling.gang == "Kueue" and not takes_others(look, survivors):
        return {}
    return ranked | {pod.name: STAYS_SPARE for pod in spares if pod.name not in ranked}


def syncs(look: Look) -> tuple[SyncPod, ...]:
    """What has the kubelets show the kept pods their places again, which they may not know yet."""
    waits = _sync_waits(look)
    count = sum(wait <= 0 for wait in waits)
    if count == 0 or waits[-1] < -LATEST_SYNC_SECONDS or not _may_lack_pods(look):
        return ()
    sync = f"{look.status.attempt}-{count}"
    return tuple(SyncPod(pod.name, pod.uid, sync) for pod in _kept_members(look) if pod.sync != sync)


def until_synced(look: Look) -> float | None:
    """Seconds until `syncs` may have more to do."""
    if not (_kept_members(look) and _may_lack_pods(look)):
        return None
    return soonest(*(wait for wait in _sync_waits(look) if wait > 0))


def _kept_members(look: Look) -> list[PodView]:
    kept = look.status.internal.kept_pods
    return [pod for pod in members(look) if pod.name in kept and pod.running and not pod.deleting]


def _may_lack_pods(look: Look) -> bool:
    """Whether node rank 0 has not said that all pods take part in the attempt, or says that ranks of it are missing."""
    report = look.observed.report
    if report is None or report.attempt != look.status.attempt or report.phase not in JOINED:
        return True
    return report.live is not None and report.live.ranks < report.live.world_size


def _sync_waits(look: Look) -> list[float]:
    # an attempt that follows an incomplete one has the begin of that, and places are given after its wait
    since, last = asking_since(look) or starting_since(look), look.status.last_failure
    if since is not None and last is not None and look.status.live_recoveries:
        since = max(since, last.time)  # a spare may have been given a place then
    return [] if since is None else [look.seconds_until(since + timedelta(seconds=after)) for after in SYNC_SECONDS]


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
