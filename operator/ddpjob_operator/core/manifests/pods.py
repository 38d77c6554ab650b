"""What a gang is made of: the manifests of its pods, its rendezvous Service and its volume claim, as plain JSON.

A pod is put together from three layers: our defaults, the user's podTemplate over them, and over both what must be
ours for the gang to work (names, labels, owner, command, the contract's environment, restart policy). See
docs/contracts.md sections 1, 2 and 8.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.api.pod import PodTemplate
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.bounds import with_default_resources
from ddpjob_operator.core.manifests.code import code_mount, code_volume
from ddpjob_operator.core.manifests.merge import merge
from ddpjob_operator.core.manifests.placement import leaving_lost_nodes, placed, placement_defaults
from ddpjob_operator.core.manifests.pod_environment import (
    ASSIGNMENT_DIR,
    RENDEZVOUS_PORT,
    STATUS_PORT,
    TERMINATION_LOG,
    Place,
    environment,
    is_assignable,
    launch_args,
)
from ddpjob_operator.core.manifests.pod_group import membership
from ddpjob_operator.core.manifests.pod_user import user_note
from ddpjob_operator.core.manifests.shared import confined, shared_mount, shared_volume
from ddpjob_operator.core.values.job import Defaults, Job, Manifest
from ddpjob_operator.core.values.names import (
    ANNOTATION_IMAGE,
    DOMAIN,
    FINALIZER,
    LABEL_ATTEMPT,
    LABEL_NODE_RANK,
    LABEL_NODES,
    LABEL_UID,
    TRAINER_CONTAINER,
    job_labels,
    pod_labels,
    pod_name,
    pvc_name,
    service_name,
)

DEFAULT_SIZE = "10Gi"
NON_ROOT = 65532
_OF_CONTAINER = "container.apparmor.security.beta.kubernetes.io/"
"""An API server refuses a pod that has such an annotation for a container that it has not."""
_NETWORKS = ("k8s.v1.cni.cncf.io/networks", "networking.gke.io/default-interface", "networking.gke.io/interfaces")
"""Further networks of a pod, of Multus and of GKE. Those that ranks use are often devices, each for one pod: a pod that
has the annotation and no device gets no sandbox (SR-IOV), or waits for the devices of those that train (GKE).
"""
_TASK_GROUPS = "yunikorn.apache.org/task-groups"
_OF_TASK_GROUPS = (_TASK_GROUPS, "yunikorn.apache.org/task-group-name", "yunikorn.apache.org/app-id", "applicationId")
"""How YuniKorn knows a gang. The first pod of an application says for which groups it reserves nodes, and is bound once
it has all of them.
"""


def rendezvous_selector(job: Job, attempt: int) -> dict[str, str]:
    """Node rank 0 of one attempt and nothing else."""
    return {LABEL_UID: job.uid, LABEL_ATTEMPT: str(attempt), LABEL_NODE_RANK: "0"}


def build_service(admitted: Admitted, attempt: int, address: str = "") -> Manifest:
    """The Service whose address is known before any pod exists; endpoints are published before readiness. `address` is
    that of an earlier one, which pods may still have."""
    job, at = admitted.job, {"clusterIP": address} if address else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(job.name),
            "namespace": job.namespace,
            "labels": job_labels(job.name, job.uid),
            "ownerReferences": [admitted.owner_reference()],
        },
        "spec": {
            "type": "ClusterIP",
            **at,
            "publishNotReadyAddresses": True,
            "selector": rendezvous_selector(job, attempt),
            "ports": [
                {
                    "name": "rendezvous",
                    "port": RENDEZVOUS_PORT,
                    "targetPort": RENDEZVOUS_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def build_pvc(admitted: Admitted) -> Manifest | None:
    """The claim for /mnt/shared, or None if the job brings its own.

    A retained claim has no owner, so it outlives the job.
    """
    job, shared = admitted.job, admitted.job.spec.shared
    if shared.claim_name is not None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [shared.access_mode],
        "resources": {"requests": {"storage": shared.size or DEFAULT_SIZE}},
    }
    if shared.storage_class_name is not None:
        spec["storageClassName"] = shared.storage_class_name
    metadata: dict[str, Any] = {
        "name": pvc_name(job.name),
        "namespace": job.namespace,
        "labels": job_labels(job.name, job.uid),
        "annotations": {ANNOTATION_IMAGE: job.spec.image or admitted.defaults.trainer_image} | user_note(job),
    }
    if not shared.retain:
        metadata["ownerReferences"] = [admitted.owner_reference()]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def build_pod(admitted: Admitted, place: Place) -> Manifest:
    """One node of the gang, or a spare, which needs a name."""
    job, defaults, attempt, node_rank = admitted.job, admitted.defaults, place.attempt, place.node_rank
    nodes = place.nodes or job.spec.nodes
    member = membership(job, place)
    template = job.spec.pod_template
    user_metadata = template.metadata if template else None
    spec = merge(_default_pod_spec(job, attempt), (template.spec if template else None) or {})
    spec = merge(spec, _owned_pod_spec(job, defaults, environment(job, place)))
    spec["containers"] = [
        with_default_resources(item, defaults.resources, spec.get("resources"))
        if item["name"] == TRAINER_CONTAINER
        else item
        for item in spec["containers"]
    ]
    spec = confined(job, spec)
    if member.gates:
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), *({"name": gate} for gate in member.gates)]
    labels = job_labels(job.name, job.uid) | pod_labels(attempt, node_rank, nodes if is_assignable(job) else None)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": place.name or pod_name(job.name, attempt, node_rank or 0),
            "namespace": job.namespace,
            "labels": users_labels(template) | member.labels | labels,
            "finalizers": [FINALIZER],
            "annotations": ((user_metadata.annotations if user_metadata else None) or {}) | member.annotations,
            "ownerReferences": [admitted.owner_reference()],
        },
        "spec": leaving_lost_nodes(placed(job, attempt, spec, place.avoid), job.spec.restart.node_lost_seconds),
    }


def users_labels(template: PodTemplate | None) -> dict[str, str]:
    """Labels of the podTemplate, but none of ours: by those a pod is taken for what it is."""
    given = (template.metadata.labels if template and template.metadata else None) or {}
    return {name: value for name, value in given.items() if not name.startswith(f"{DOMAIN}/")}


def users_annotations(template: PodTemplate | None, *containers: str) -> dict[str, str]:
    """Annotations of the podTemplate, for a pod of these containers."""
    given = (template.metadata.annotations if template and template.metadata else None) or {}
    of_theirs = {f"{_OF_CONTAINER}{name}" for name in containers}
    return {name: value for name, value in given.items() if not name.startswith(_OF_CONTAINER) or name in of_theirs}


def without_networks(annotations: dict[str, str]) -> dict[str, str]:
    """Annotations for a pod that does not train and has the devices of none that does."""
    return {name: value for name, value in annotations.items() if name not in _NETWORKS}


def without_gang(template: PodTemplate | None, given: dict[str, str]) -> dict[str, str]:
    """Labels or annotations of the podTemplate for a pod that does not train. Where they make a gang in YuniKorn, it is
    no member, nor of the same application: if it came first, that would have no gang at all.
    """
    annotations = (template.metadata.annotations if template and template.metadata else None) or {}
    if _TASK_GROUPS not in annotations:
        return given
    return {name: value for name, value in given.items() if name not in _OF_TASK_GROUPS}


def restricted_context() -> Manifest:
    """The pod's part of the Pod Security Standards' profile `restricted`."""
    return {
        "runAsNonRoot": True,
        "runAsUser": NON_ROOT,
        "runAsGroup": NON_ROOT,
        "fsGroup": NON_ROOT,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def restricted_container() -> Manifest:
    """A container's part of it; what it may write to is mounted."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _default_pod_spec(job: Job, attempt: int) -> Manifest:
    """What a user may override: security context, spreading, scratch volumes, placement."""
    shm: Manifest = {"medium": "Memory"}
    if job.spec.placement.shm_size is not None:
        shm["sizeLimit"] = job.spec.placement.shm_size
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": restricted_context(),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {LABEL_UID: job.uid, LABEL_ATTEMPT: str(attempt)}},
            }
        ],
        "containers": [{"name": TRAINER_CONTAINER, "securityContext": restricted_container()}],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": shm}],
        **placement_defaults(job),
    }


def _owned_pod_spec(job: Job, defaults: Defaults, env: list[Manifest]) -> Manifest:
    """What makes the pod a node of this gang; it wins over the podTemplate."""
    container: Manifest = {
        "name": TRAINER_CONTAINER,
        "image": job.spec.image or defaults.trainer_image,
        "command": ["python", "-m", "ddp_trainer.launch"],
        "args": launch_args(job),
        "env": env,
        "ports": [
            {"name": "metrics", "containerPort": STATUS_PORT, "protocol": "TCP"},
            {"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"},
        ],
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            shared_mount(),
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the pod
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    if job.spec.resources is not None:
        container["resources"] = job.spec.resources.model_dump(by_alias=True, exclude_none=True)
    volumes = [shared_volume(job)]
    if job.spec.code is not None:
        volumes.append(code_volume(job.spec.code))
        container["volumeMounts"].append(code_mount())
    if is_assignable(job):
        volumes.append({"name": "assignment", "downwardAPI": {"items": _assignment_files()}})
        container["volumeMounts"].append({"name": "assignment", "mountPath": ASSIGNMENT_DIR, "readOnly": True})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.spec.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }


def _assignment_files() -> list[Manifest]:
    """The pod's place in the gang, which is a matter of its labels, as files that follow them."""
    files = {"attempt": LABEL_ATTEMPT, "node-rank": LABEL_NODE_RANK, "nodes": LABEL_NODES}
    return [
        {"path": name, "fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{label}']"}}
        for name, label in files.items()
    ]
