"""Where the pods of a gang may run: `spec.placement`, the scheduler, and the nodes that a job keeps away from.

All of it is added to what the podTemplate says and takes nothing from it: a field that the template sets stays as it
is, and a list of terms gets ours as well.

Affinity terms select the pods of the same attempt, since pods of an older one may take long to end. Where a pod's
place in the gang may change, they select all pods of the job: its attempt is a label that is patched later.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.core.manifests.pod_environment import is_assignable
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import LABEL_ATTEMPT, LABEL_NODE_RANK, LABEL_UID

HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HEAVIEST = 100
"""The largest weight of a preference."""

SCHEDULERS = {"Coscheduling": "scheduler-plugins-scheduler", "Volcano": "volcano"}
"""What their projects call them when they are installed beside the cluster's own."""


LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of a node that has stopped posting its status. Kubernetes gives every pod 300 s on it."""


def placement_defaults(job: Job) -> Manifest:
    """Fields of the pod's spec that a podTemplate may override."""
    scheduling, found = job.spec.scheduling, Manifest()
    if job.spec.placement.host_network:
        # else the pods would ask the node's resolver, which knows no Service
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if scheduler := scheduling.scheduler_name or SCHEDULERS.get(scheduling.gang):
        found["schedulerName"] = scheduler
    if scheduling.priority_class_name is not None:
        found["priorityClassName"] = scheduling.priority_class_name
    return found


def placed(job: Job, attempt: int, spec: Manifest, avoid: tuple[str, ...] = ()) -> Manifest:
    """`spec` with the terms of affinity that the job asks for; `avoid` names the nodes to keep away from."""
    placement = job.spec.placement
    of_gang = {LABEL_UID: job.uid} if is_assignable(job) else {LABEL_UID: job.uid, LABEL_ATTEMPT: str(attempt)}
    # the pod of the initializers carries the job's labels too, and has no node rank
    selector = {"matchLabels": of_gang, "matchExpressions": [{"key": LABEL_NODE_RANK, "operator": "Exists"}]}
    affinity = dict(spec.get("affinity") or {})
    if placement.topology_key is not None:
        _add_pod_term(affinity, "podAffinity", selector, placement.topology_key)
    if placement.one_pod_per_node or placement.host_network:
        _add_pod_term(affinity, "podAntiAffinity", selector, HOSTNAME)
    if avoid:
        affinity["nodeAffinity"] = _away_from(avoid, affinity.get("nodeAffinity") or {})
    return spec | {"affinity": affinity} if affinity else spec


def leaving_lost_nodes(spec: Manifest, seconds: int) -> Manifest:
    """The pod's `spec` with `seconds` on a node that is unreachable or not ready, in place of Kubernetes' 300.

    Then its pods are deleted whatever their phase is, and of one that has not begun this is the only sign. A toleration
    of the podTemplate's own stays.
    """
    known = tuple(item for item in spec.get("tolerations") or () if isinstance(item, dict))
    given = {item.get("key") for item in known if item.get("effect") in (None, "", "NoExecute")}
    if None in given or "" in given:
        return spec
    ours = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key in LOST_NODE_TAINTS
        if key not in given
    ]
    return spec | {"tolerations": [*known, *ours]}


def preferring_others(manifest: Manifest, nodes: tuple[str, ...]) -> Manifest:
    """The pod `manifest`, drawn to any node but these as strongly as a preference can; it may still run there."""
    if not nodes:
        return manifest
    elsewhere = {"matchFields": _not_on(nodes)}
    spec = manifest["spec"]
    affinity = spec.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = [*(of_nodes.get(PREFERRED) or ()), {"weight": HEAVIEST, "preference": elsewhere}]
    affinity = affinity | {"nodeAffinity": of_nodes | {PREFERRED: terms}}
    return manifest | {"spec": spec | {"affinity": affinity}}


def _add_pod_term(affinity: Manifest, kind: str, selector: Manifest, topology_key: str) -> None:
    known: dict[str, Any] = affinity.get(kind) or {}
    term = {"labelSelector": selector, "topologyKey": topology_key}
    affinity[kind] = known | {REQUIRED: [*(known.get(REQUIRED) or ()), term]}


def _away_from(nodes: tuple[str, ...], known: Manifest) -> Manifest:
    """Node selector terms are alternatives, so ours goes into each of them; an empty one matches no node and stays."""
    elsewhere = _not_on(nodes)
    required = known.get(REQUIRED) or {}
    terms = [
        term | {"matchFields": [*(term.get("matchFields") or ()), *elsewhere]} if any(term.values()) else term
        for term in required.get("nodeSelectorTerms") or ()
    ]
    return known | {REQUIRED: required | {"nodeSelectorTerms": terms or [{"matchFields": elsewhere}]}}


def _not_on(nodes: tuple[str, ...]) -> list[Manifest]:
    """Requirements (`matchFields`) that keep a pod off these nodes.

    By their names: the label kubernetes.io/hostname may have another value. The API server takes one name in each.
    """
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(nodes)]
