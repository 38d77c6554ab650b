"""The group in which a gang is admitted: which one a new pod joins, and whether it takes another.

Kueue's are after its controller of plain pod groups (kubernetes-sigs/kueue, pkg/controller/jobs/pod). It counts a pod
for as long as its phase is not Failed, and deletes the newest of those that are more than the group wants. It finishes
a group of which no pod runs, and leaves a pod that joins a finished one behind its scheduling gate for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddpjob_operator.core.failure.detect import has_succeeded
from ddpjob_operator.core.failure.node_lost import KUBELET_SECONDS, is_lost, patience
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import dns_label, group_name
from ddpjob_operator.core.values.observed import PodPhase, PodView

RESERVED_SECONDS = 60.0
"""How long a pod may find no node among what Kueue holds it to, while others of its group run."""


def group_of(look: Look, pods: Iterable[PodView]) -> str:
    """That of these pods of the gang; the attempt's own where they have none that takes others."""
    return _open_group(look, pods) or group_name(look.job.name, look.job.uid, look.status.attempt)


def _open_group(look: Look, pods: Iterable[PodView]) -> str:
    if look.job.spec.scheduling.gang == "Kueue":
        return next((pod.group for pod in pods if pod.group and not pod.ended and not pod.deleting), "")
    # version 0.1.0 had one group for all attempts, and pods had no label of ours that named it
    return next((pod.group or dns_label(look.job.name) for pod in pods), "")


def room(look: Look, group: str) -> int:
    """How many pods may join the group now."""
    if look.job.spec.scheduling.gang != "Kueue":
        return look.gang_size
    return look.gang_size - sum(pod.group == group and _counts(pod) for pod in look.observed.pods)


def takes_others(look: Look, kept: Collection[PodView]) -> bool:
    """Whether Kueue admits new pods beside those that are `kept`: their group is open, and all others of it will have
    failed. One that has succeeded, or whose node is lost, keeps its place. A spare is of no group.
    """
    group, uids, allowed = _open_group(look, kept), {pod.uid for pod in kept}, patience(look)
    others = [pod for pod in look.observed.pods if pod.group == group and pod.uid not in uids and _counts(pod)]
    return group != "" and not any(
        has_succeeded(pod) or is_lost(pod, allowed, look.now) or _is_overdue(look, pod) or finds_no_place(look, pod)
        for pod in others
    )


def finds_no_place(look: Look, pod: PodView) -> bool:
    """Whether a pod that has joined the group of others waits in vain. It gets what the pod had that it replaces: of a
    topology the node, which the job may keep away from; and the ProvisioningRequest, for which cluster-autoscaler adds
    no other node (`ProvisioningRequestPodsFilter`).
    """
    left = _until_no_place(look, pod)
    return left is not None and left <= 0


def until_no_place(look: Look, pods: Iterable[PodView]) -> float | None:
    """Seconds until the first of `pods` is known to wait in vain."""
    waits = (_until_no_place(look, pod) for pod in pods)
    return min((wait for wait in waits if wait is not None and wait > 0), default=None)


def _until_no_place(look: Look, pod: PodView) -> float | None:
    waits = pod.reserved and pod.reason == "Unschedulable" and not (pod.placed or pod.deleting)
    joined = look.job.spec.scheduling.gang == "Kueue" and bool(look.status.internal.kept_pods)
    if not (waits and joined) or pod.created is None:
        return None
    return RESERVED_SECONDS - look.seconds_since(pod.created)


def _is_overdue(look: Look, pod: PodView) -> bool:
    """Whether its kubelet does not say that it has failed, as of a node that is gone."""
    return pod.gone_by is not None and look.seconds_since(pod.gone_by) >= KUBELET_SECONDS


def _counts(pod: PodView) -> bool:
    return pod.phase is not PodPhase.FAILED and (pod.placed or not pod.deleting)
