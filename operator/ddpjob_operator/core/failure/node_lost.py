"""Nodes that fell silent, and gangs that wait for a peer which no pod's end accounts for.

Stock Kubernetes gives a silent node 40 to 50 s, then 300 s more until it deletes its pods, and those stay Terminating
until somebody confirms that they are gone. A job need not wait for that: its next attempt has new names, the scheduler
keeps it away from a node that is not ready (KEP-382), and a pod that still runs there is refused by the volume. Only
`forceDeleteLostPods` removes such a pod from the API server without its kubelet's word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_operator.api.policies import Restart
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.failure.detect import DELETED_FOR_TAINT, Failure, Retry
from ddpjob_operator.core.values.actions import DeletePod
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport

KUBELET_SECONDS = 10.0
"""How long a kubelet that lives may take to see a pod that was bound to it; usually it is a second."""

STILL_SECONDS = 10.0
STILL_STEPS = 10
"""How long a gang may take no step, in seconds and in steps, until it stands still."""

STRANDED_SECONDS = 60.0
"""How long node rank 0 may wait for the next attempt before it is given one for that alone: longer than Kubernetes
takes to notice a silent node (node-monitor-grace-period, 40 to 50 s), which would be the better reason.
"""


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long nodes may be silent."""

    seconds: float
    unresponsive: frozenset[str] = frozenset()
    """Nodes that show another sign already: there is no need to wait for them."""

    def of(self, pod: PodView) -> float:
        """Seconds for which the node of `pod` may be silent."""
        return 0.0 if pod.node_name in self.unresponsive else self.seconds


def patience(look: Look) -> Patience:
    """`restart.nodeLostSeconds`, or none while the gang takes no step, or for a node that confirms no deletion.

    Nodes are silent for some seconds, too, where an API server comes back; but then their ranks train on.
    """
    stands_still = look.status.phase is Phase.RUNNING and _stands_still(look)
    seconds = 0.0 if stands_still else float(look.job.spec.restart.node_lost_seconds)
    return Patience(seconds, unresponsive_nodes(look))


def unresponsive_nodes(look: Look) -> frozenset[str]:
    """Nodes that have not confirmed the deletion of a pod of this job in time. Kubernetes may not know it yet, and
    place the next pods there.
    """
    return frozenset(pod.node_name for pod in look.observed.pods if pod.node_name and is_unconfirmed(pod, look.now))


def gone_nodes(look: Look) -> frozenset[str]:
    """Nodes that have not confirmed a deletion in time, and show another sign. A kubelet that lives may take as long to
    end a pod: GPUs are torn down, or a volume hangs.
    """
    nodes, silent = unresponsive_nodes(look), patience(look)
    if not nodes:
        return nodes
    signs = (pod for pod in look.observed.pods if is_lost(pod, silent, look.now) or _is_tainted(pod, look.now))
    return nodes.intersection(pod.node_name for pod in signs if pod.node_name)


def _is_tainted(pod: PodView, now: datetime) -> bool:
    return pod.disruption == DELETED_FOR_TAINT and is_unconfirmed(pod, now)


def is_unconfirmed(pod: PodView, now: datetime) -> bool:
    """Whether nothing is heard of the pod although it should have been gone for as long as a kubelet may take."""
    if pod.ended or pod.termination is not None or pod.gone_by is None:
        return False
    return (now - pod.gone_by).total_seconds() >= KUBELET_SECONDS


def _stands_still(look: Look) -> bool:
    """Whether node rank 0 says that its ranks wait for others, in a collective or for the next attempt, or has not
    answered for as long.
    """
    report = look.observed.report
    if report is None or report.attempt != look.status.attempt:
        return False
    if look.observed.silent_seconds >= STILL_SECONDS:
        return True
    if report.phase == "waiting":
        return (report.phase_seconds or 0) >= STILL_SECONDS
    return report.phase == "train" and any(
        rank.age_seconds is not None and rank.age_seconds >= max(STILL_SECONDS, STILL_STEPS * (rank.step_seconds or 0))
        for rank in report.ranks
    )


def is_lost(pod: PodView, patience: Patience, now: datetime) -> bool:
    """Whether the pod's node has been silent for too long."""
    since = silent_since(pod)
    return since is not None and _left(since, patience.of(pod), now) <= 0


def silent_since(pod: PodView) -> datetime | None:
    """Since when the pod's node says nothing: of a pod that runs, or of one that it should have begun to start."""
    if pod.not_ready_since is None and pod.unacknowledged_since is not None:
        return pod.unacknowledged_since + timedelta(seconds=KUBELET_SECONDS)
    return pod.not_ready_since


def lost_nodes(pods: Iterable[PodView], patience: Patience, now: datetime) -> tuple[Failure, ...]:
    """A failure for each pod of the gang whose node is lost."""
    return tuple(
        Failure(
            "NodeLost",
            _what_is_lost(pod),
            Retry.YES,
            pod_name=pod.name,
            node_name=pod.node_name,
            node_rank=pod.node_rank,
            time=silent_since(pod),
        )
        for pod in pods
        if is_lost(pod, patience, now)
    )


def _what_is_lost(pod: PodView) -> str:
    if pod.not_ready_since is None:
        return (
            f"pod {pod.name} was assigned to node {pod.node_name} at {pod.unacknowledged_since:%H:%M:%S} UTC, and the "
            "node has not begun to start it"
        )
    return (
        f"node {pod.node_name} is NotReady since {pod.not_ready_since:%H:%M:%S} UTC; pod {pod.name} may still "
        "be running, but cannot write snapshots once the next attempt starts"
    )


def until_lost(pods: Iterable[PodView], patience: Patience, now: datetime) -> float | None:
    """Seconds until the first node that is silent now will be lost; None if all of them answer, or are."""
    waits = [_left(since, patience.of(pod), now) for pod in pods if (since := silent_since(pod)) is not None]
    return min((wait for wait in waits if wait > 0), default=None)


def force_deletions(pods: Iterable[PodView], policy: Restart, now: datetime) -> tuple[DeletePod, ...]:
    """Pods on lost nodes taken off the API server by force, where the policy allows it: even those that are going.

    Once is enough: after that only finalizers keep a pod, and those of others, such as Kueue's, are theirs to remove.
    """
    if not policy.force_delete_lost_pods:
        return ()
    patience = Patience(policy.node_lost_seconds)
    return tuple(DeletePod(pod.name, pod.uid, 0) for pod in pods if not pod.forced and is_lost(pod, patience, now))


def until_forced(pods: Iterable[PodView], policy: Restart, now: datetime) -> float | None:
    """Seconds until the first of `pods` may be deleted by force; None if none may, or all that may are due."""
    return until_lost(pods, Patience(policy.node_lost_seconds), now) if policy.force_delete_lost_pods else None


def stranded(pods: Iterable[PodView], attempt: int, report: TrainerReport | None) -> tuple[Failure, ...]:
    """A failure where node rank 0 waits for the attempt after this one, and no pod has ended or fallen silent.

    A broken connection does that: every launcher lost its peers and waits for the operator, which sees nothing wrong.
    """
    if report is None or (report.attempt, report.phase) != (attempt, "waiting"):
        return ()
    waited = report.phase_seconds or 0.0
    if waited < STRANDED_SECONDS:
        return ()
    gang = tuple(pods)
    if any(pod.termination is not None or pod.deleting or pod.not_ready_since is not None for pod in gang):
        return ()
    first = next((pod for pod in gang if pod.node_rank == 0), None)
    message = f"node rank 0 lost its peers {waited:.0f} s ago, but all pods of the gang still exist"
    name, node = (first.name, first.node_name) if first else (None, None)
    return (Failure("PeerLost", message, Retry.YES, pod_name=name, node_name=node, node_rank=0),)


def _left(since: datetime, seconds: float, now: datetime) -> float:
    return seconds - (now - since).total_seconds()
