"""Nodes that fell silent, and gangs that wait for a peer which no pod's end accounts for.

Stock Kubernetes gives a silent node 40 s, then 300 s more until it deletes its pods, and those stay Terminating until
somebody confirms that they are gone. A job need not wait for that: its next attempt has new names, the scheduler
keeps it away from a node that is not ready (KEP-382), and a pod that still runs there is refused by the volume. Only
`forceDeleteLostPods` removes such a pod from the API server without its kubelet's word.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from ddpjob_operator.api.policies import Restart
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.values.actions import DeletePod
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport

KUBELET_SECONDS = 10.0
"""How long a kubelet that lives may take to see a pod that was bound to it; usually it is a second."""

STRANDED_SECONDS = 60.0
"""How long node rank 0 may wait for the next attempt before it is given one for that alone: longer than Kubernetes
takes to notice a silent node (node-monitor-grace-period, 40 to 50 s), which would be the better reason.
"""


def is_lost(pod: PodView, policy: Restart, now: datetime) -> bool:
    """Whether the pod's node has been silent for `restart.nodeLostSeconds`."""
    since = silent_since(pod)
    return since is not None and _left(since, policy, now) <= 0


def silent_since(pod: PodView) -> datetime | None:
    """Since when the pod's node says nothing: of a pod that runs, or of one that it should have begun to start."""
    if pod.not_ready_since is None and pod.unacknowledged_since is not None:
        return pod.unacknowledged_since + timedelta(seconds=KUBELET_SECONDS)
    return pod.not_ready_since


def lost_nodes(pods: Iterable[PodView], policy: Restart, now: datetime) -> tuple[Failure, ...]:
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
        if is_lost(pod, policy, now)
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


def until_lost(pods: Iterable[PodView], policy: Restart, now: datetime) -> float | None:
    """Seconds until the first node that is silent now will be lost; None if all of them answer, or are."""
    waits = [_left(since, policy, now) for pod in pods if (since := silent_since(pod)) is not None]
    return min((wait for wait in waits if wait > 0), default=None)


def force_deletions(pods: Iterable[PodView], policy: Restart, now: datetime) -> tuple[DeletePod, ...]:
    """Pods on lost nodes taken off the API server by force, where the policy allows it: even those that are going."""
    if not policy.force_delete_lost_pods:
        return ()
    return tuple(DeletePod(pod.name, pod.uid, 0) for pod in pods if is_lost(pod, policy, now))


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


def _left(since: datetime, policy: Restart, now: datetime) -> float:
    return policy.node_lost_seconds - (now - since).total_seconds()
