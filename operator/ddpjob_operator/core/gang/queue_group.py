"""The group in which Kueue has admitted a gang: which one a new pod joins, and whether it takes another.

After Kueue's controller of plain pod groups (kubernetes-sigs/kueue, pkg/controller/jobs/pod). It counts a pod for as
long as its phase is not Failed, and deletes the newest of those that are more than the group wants. It finishes a group
of which no pod runs, and leaves a pod that joins a finished one behind its scheduling gate for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddpjob_operator.core.failure.detect import has_succeeded
from ddpjob_operator.core.failure.node_lost import is_lost, is_unconfirmed, patience
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodPhase, PodView


def group_of(look: Look, pods: Iterable[PodView]) -> str:
    """The group that is open for as long as these pods run; empty where there is none."""
    if look.job.spec.scheduling.gang != "Kueue":
        return ""
    return next((pod.queue_group for pod in pods if not pod.ended and not pod.deleting and pod.queue_group), "")


def room(look: Look, group: str) -> int:
    """How many pods may still join."""
    return look.gang_size - sum(pod.queue_group == group and _counts(pod) for pod in look.observed.pods)


def takes_others(look: Look, kept: Collection[PodView]) -> bool:
    """Whether the pods that are `kept` can be completed by new ones: their group is open, and all others of it will
    have failed. One that has succeeded, or whose node is lost, keeps its place. A spare is of no group.
    """
    group, uids, allowed = group_of(look, kept), {pod.uid for pod in kept}, patience(look)
    others = [pod for pod in look.observed.pods if pod.queue_group == group and pod.uid not in uids and _counts(pod)]
    return group != "" and not any(
        has_succeeded(pod) or is_lost(pod, allowed, look.now) or is_unconfirmed(pod, look.now) for pod in others
    )


def _counts(pod: PodView) -> bool:
    return pod.phase is not PodPhase.FAILED and (pod.placed or not pod.deleting)
