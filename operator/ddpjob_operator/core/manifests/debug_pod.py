"""The pod that `ddpjob debug` starts for a shell: what a failed pod had, without the program that failed.

It has the failed pod's image, environment, volumes and security context, and by default its node. Secrets are
references, as in the failed pod. Init containers and sidecars are left out. It requests little, so that it fits beside
the next attempt; what it may use at most is what the failed pod might.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.core.manifests.bounds import amount
from ddpjob_operator.core.manifests.code import VOLUME as CODE
from ddpjob_operator.core.manifests.placement import REQUIRED
from ddpjob_operator.core.manifests.shared import VOLUME as SHARED
from ddpjob_operator.core.manifests.short_lived import LEAST, short_lived_metadata
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import TRAINER_CONTAINER

ROLE = "debug"
GRACE_SECONDS = 1
"""`sleep` as process 1 does not hear SIGTERM."""
_FROM_POD = (
    "automountServiceAccountToken", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases", "hostIPC",
    "hostNetwork", "hostPID", "hostUsers", "imagePullSecrets", "nodeSelector", "runtimeClassName", "securityContext",
    "serviceAccountName", "tolerations",
)  # fmt: skip
_FROM_CONTAINER = (
    "env", "envFrom", "image", "imagePullPolicy", "securityContext", "volumeDevices", "volumeMounts", "workingDir"
)  # fmt: skip
_OURS = frozenset({"assignment", "shm", "tmp", CODE, SHARED})
_CORDONED = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}
"""A node on which pods fail is often cordoned until somebody has looked."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What a person asks for."""

    seconds: int
    """After which the kubelet stops the pod, whatever becomes of the command."""
    node: str | None
    """The only Kubernetes node that it may run on; None for any."""
    gpus: bool = False
    """Whether it gets the failed pod's GPUs and other devices, and its requests."""


def build_debug_pod(job: Job, failed: Manifest, visit: Visit) -> Manifest:
    """A pod like `failed`, which is a pod of `job` or the manifest of one."""
    given = failed["spec"]
    spec: Manifest = {name: given[name] for name in _FROM_POD if name in given}
    trainer = next(item for item in given["containers"] if item["name"] == TRAINER_CONTAINER)
    names = _volumes(job)
    spec |= {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": visit.seconds,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [_container(trainer, visit, names)],
        "volumes": [item for item in given.get("volumes") or () if item.get("name") in names],
    }
    if visit.node is not None:
        spec["tolerations"] = [*(given.get("tolerations") or ()), _CORDONED]
        spec["affinity"] = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [_only(visit.node)]}}}
    elif of_nodes := (given.get("affinity") or {}).get("nodeAffinity"):
        spec["affinity"] = {"nodeAffinity": of_nodes}
    if visit.gpus and "resourceClaims" in given:
        spec["resourceClaims"] = given["resourceClaims"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": short_lived_metadata(job, ROLE, TRAINER_CONTAINER, devices=visit.gpus),
        "spec": spec,
    }


def _volumes(job: Job) -> frozenset[str]:
    """Names of the volumes that the operator and the podTemplate give a pod. The API server and webhooks add others,
    and would add them again: two of one name are refused.
    """
    template = job.spec.pod_template
    given = ((template.spec if template else None) or {}).get("volumes") or ()
    return _OURS | {str(item.get("name")) for item in given}


def _container(trainer: Manifest, visit: Visit, volumes: frozenset[str]) -> Manifest:
    """It keeps the name, to which fields of the environment and of volumes may refer."""
    kept = {name: trainer[name] for name in _FROM_CONTAINER if name in trainer}
    mounts: Iterable[Manifest] = trainer.get("volumeMounts") or ()
    return kept | {
        "name": TRAINER_CONTAINER,
        "command": ["sleep", str(visit.seconds)],
        "volumeMounts": [item for item in mounts if item.get("name") in volumes],
        "resources": _resources(trainer.get("resources") or {}, visit),
    }


def _resources(given: Manifest, visit: Visit) -> Manifest:
    if visit.gpus:
        return given
    limits = {name: value for name, value in (given.get("limits") or {}).items() if "/" not in name}
    requests = {name: _smaller(least, limits.get(name)) for name, least in LEAST.items()}
    if "ephemeral-storage" in limits:
        requests["ephemeral-storage"] = "0"  # the API server would request as much as the limit
    # huge pages are requested as they are limited
    requests |= {name: value for name, value in limits.items() if name.startswith("hugepages-")}
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _smaller(least: str, limit: Any) -> Any:
    return least if limit is None or amount(least) <= amount(limit) else limit


def _only(node: str) -> Manifest:
    """By its name: the label kubernetes.io/hostname may have another value."""
    return {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
