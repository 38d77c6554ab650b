"""A gang that is admitted as a whole, by whichever scheduler or queue the cluster has for that.

- Coscheduling (KEP-42 of kubernetes-sigs/scheduler-plugins) and Volcano read a PodGroup, which is made before the
  pods are, and bind no pod before `minMember` of them fit.
- Kueue reads labels of the pods alone (its "plain pod groups"): it holds all of them by a scheduling gate until the
  queue has quota for the whole group. A group is over, and its quota is given back, as soon as none of its pods runs.

Each attempt is a group of its own: pods of the last one that are still there, as on a lost node, would be counted as
members. Where pods outlive an attempt, others are replaced inside their group. An elastic gang is worth starting from
`elastic.minNodes` on, so its group asks for no more than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.values.job import Job, Manifest, Problem
from ddpjob_operator.core.values.names import (
    KUEUE_GROUP,
    LABEL_GROUP,
    TRAINER_CONTAINER,
    group_name,
    job_labels,
)

COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
VOLCANO = "scheduling.volcano.sh/v1beta1"
KUEUE_GATE = "kueue.x-k8s.io/admission"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"

_PROVIDERS = {
    COSCHEDULING: ("the coscheduling plugin of kubernetes-sigs/scheduler-plugins", "Coscheduling"),
    VOLCANO: ("Volcano", "Volcano"),
}


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes a pod a member of its job's group."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    """Scheduling gates (KEP-3521), which keep the pod from the scheduler. Servers before 1.26 drop them."""


def membership(job: Job, place: Place) -> Membership:
    """How a pod joins the group of its gang."""
    group = place.group or group_name(job.name, job.uid, place.attempt)
    match job.spec.scheduling.gang:
        case "Coscheduling":
            return Membership({LABEL_GROUP: group, "scheduling.x-k8s.io/pod-group": group})
        case "Volcano":
            return Membership({LABEL_GROUP: group}, {"scheduling.k8s.io/group-name": group})
        case "Kueue":
            return _kueue(job, place, group)
        case "None":
            return Membership()


def _kueue(job: Job, place: Place, group: str) -> Membership:
    labels = {KUEUE_QUEUE: job.spec.scheduling.queue or ""}
    annotations: dict[str, str] = {}
    if job.spec.restart.force_delete_lost_pods:  # with its feature gate FailureRecoveryPolicy, since 0.15
        annotations["kueue.x-k8s.io/safe-to-forcefully-delete"] = "true"
    if place.node_rank is None:
        # the group is admitted when all of it is there, and spares are made later: each queues for itself
        return Membership(labels, annotations, gates=(KUEUE_GATE,))
    labels |= {LABEL_GROUP: group, KUEUE_GROUP: group}
    annotations |= {
        KUEUE_COUNT: str(place.nodes or job.spec.nodes),
        # all nodes are of one kind. Kueue would hash the pods' specs, which differ by attempt and by excluded nodes,
        # and hold a replacement of a kind that its group does not know
        "kueue.x-k8s.io/role-hash": TRAINER_CONTAINER,
        # else Kueue keeps the pods of a group that has ended, and their quota, for others that are to take their place
        "kueue.x-k8s.io/retriable-in-group": "false",
    }
    return Membership(labels, annotations, gates=(KUEUE_GATE,))


def build_pod_group(admitted: Admitted, name: str) -> Manifest | None:
    """The PodGroup of a gang whose scheduler reads one."""
    job, scheduling = admitted.job, admitted.job.spec.scheduling
    if scheduling.gang not in ("Coscheduling", "Volcano"):
        return None
    members = job.spec.elastic.min_nodes if job.spec.elastic else job.spec.nodes
    spec: Manifest = {"minMember": members}
    if resources := _least_resources(job, members):
        spec["minResources"] = resources
    if scheduling.gang == "Coscheduling":
        if scheduling.timeout_seconds is not None:
            spec["scheduleTimeoutSeconds"] = scheduling.timeout_seconds
    else:
        if scheduling.queue is not None:
            spec["queue"] = scheduling.queue
        if scheduling.priority_class_name is not None:
            spec["priorityClassName"] = scheduling.priority_class_name
    return {
        "apiVersion": COSCHEDULING if scheduling.gang == "Coscheduling" else VOLCANO,
        "kind": "PodGroup",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": job_labels(job.name, job.uid),
            "ownerReferences": [admitted.owner_reference()],
        },
        "spec": spec,
    }


def _least_resources(job: Job, members: int) -> dict[str, str]:
    """What so many trainer containers ask for, by which a queue decides whether to let the group try at all."""
    resources = job.spec.resources
    if resources is None:
        return {}
    # what is only limited is asked for in the same amount (Kubernetes' own default)
    asked = (resources.limits or {}) | (resources.requests or {})
    return {name: times(str(quantity), members) for name, quantity in asked.items()}


def times(quantity: str, count: int) -> str:
    """A Kubernetes quantity `count` times over, in the same unit: 3 times 1.5Gi is 4.5Gi."""
    number = quantity.rstrip("mkKMGTPEi")
    return f"{Decimal(number) * count:f}{quantity[len(number) :]}"


def unknown_kind(api_version: str, kind: str) -> Problem:
    """The API server has no such kind: somebody has to install it, or the job must do without."""
    provider, gang = _PROVIDERS.get(api_version, (f"whatever serves {api_version}", ""))
    instead = f", or remove scheduling.gang {gang} from the job" if gang else ""
    return Problem(f"{kind}Missing", f"the API server knows no {kind} of {api_version}: install {provider}{instead}")
