"""What a gang is made of: the manifests of its pods, its rendezvous Service and its volume claim, as plain JSON.

A pod is put together from three layers: our defaults, the user's podTemplate over them, and over both what must be
ours for the gang to work (names, labels, owner, command, the contract's environment, restart policy). See
docs/contracts.md sections 1, 2 and 8.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.pod import EnvVar
from ddpjob_operator.core.model import Defaults, Job, Manifest, ServiceView
from ddpjob_operator.core.names import (
    LABEL_ATTEMPT,
    LABEL_NODE_RANK,
    LABEL_UID,
    TRAINER_CONTAINER,
    claim_name,
    job_labels,
    pod_labels,
    pod_name,
    service_name,
)

SHARED_PATH = "/mnt/shared"
STATUS_PORT = 9400
RENDEZVOUS_PORT = 29500
RUN_DIR = "/dev/shm/ddpjob"  # noqa: S108 - an emptyDir of this pod alone
DEFAULT_MODULE = "ddp_trainer.train"
DEFAULT_SIZE = "10Gi"
GRACE_SECONDS = 60

_NON_ROOT = 65532
_CONTAINERS = ("containers", "initContainers")


def owner_reference(job: Job) -> Manifest:
    """Makes the garbage collector remove a child after its job. It does not block the job's deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def rendezvous_selector(job: Job, attempt: int) -> dict[str, str]:
    """Node rank 0 of one attempt and nothing else."""
    return {LABEL_UID: job.uid, LABEL_ATTEMPT: str(attempt), LABEL_NODE_RANK: "0"}


def build_service(job: Job, attempt: int) -> Manifest:
    """The Service whose address is known before any pod exists; endpoints are published before readiness."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(job.name),
            "namespace": job.namespace,
            "labels": job_labels(job.name, job.uid),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "type": "ClusterIP",
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


def build_claim(job: Job) -> Manifest | None:
    """The claim for /mnt/shared, or None if the job brings its own.

    A retained claim has no owner, so it outlives the job.
    """
    shared = job.spec.shared
    if shared.claim_name is not None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [shared.access_mode],
        "resources": {"requests": {"storage": shared.size or DEFAULT_SIZE}},
    }
    if shared.storage_class_name is not None:
        spec["storageClassName"] = shared.storage_class_name
    metadata: dict[str, Any] = {
        "name": claim_name(job.name),
        "namespace": job.namespace,
        "labels": job_labels(job.name, job.uid),
    }
    if not shared.retain:
        metadata["ownerReferences"] = [owner_reference(job)]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def build_pod(job: Job, attempt: int, node_rank: int, service: ServiceView, defaults: Defaults) -> Manifest:
    """One node of the gang."""
    template = job.spec.pod_template
    user_spec = (template.spec if template else None) or {}
    user_metadata = template.metadata if template else None
    labels = pod_labels(job.name, job.uid, attempt, node_rank)
    spec = merge(_default_pod_spec(job, attempt), user_spec)
    spec = merge(spec, _owned_pod_spec(job, attempt, node_rank, service, defaults))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(job.name, attempt, node_rank),
            "namespace": job.namespace,
            "labels": ((user_metadata.labels if user_metadata else None) or {}) | labels,
            "annotations": (user_metadata.annotations if user_metadata else None) or {},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def _default_pod_spec(job: Job, attempt: int) -> Manifest:
    """What a user may override: security context, spreading, grace, scratch volumes."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NON_ROOT,
            "runAsGroup": _NON_ROOT,
            "fsGroup": _NON_ROOT,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {LABEL_UID: job.uid, LABEL_ATTEMPT: str(attempt)}},
            }
        ],
        "containers": [
            {
                "name": TRAINER_CONTAINER,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _owned_pod_spec(job: Job, attempt: int, node_rank: int, service: ServiceView, defaults: Defaults) -> Manifest:
    """What makes the pod a node of this gang; it wins over the podTemplate."""
    container: Manifest = {
        "name": TRAINER_CONTAINER,
        "image": job.spec.image or defaults.trainer_image,
        "command": ["python", "-m", "ddp_trainer.launch"],
        "args": launch_args(job),
        "env": environment(job, attempt, node_rank, service),
        "ports": [
            {"name": "metrics", "containerPort": STATUS_PORT, "protocol": "TCP"},
            {"name": "rendezvous", "containerPort": RENDEZVOUS_PORT, "protocol": "TCP"},
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED_PATH},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the pod
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    if job.spec.resources is not None:
        container["resources"] = job.spec.resources.model_dump(by_alias=True, exclude_none=True)
    claim = job.spec.shared.claim_name or claim_name(job.name)
    return {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
    }


def launch_args(job: Job) -> list[str]:
    """Arguments of the launcher: what to run, and the user's own after `--`, safe from Kubernetes' `$(NAME)`
    expansion.
    """
    entrypoint = job.spec.entrypoint
    if entrypoint.script is not None:
        start = ["--script", entrypoint.script]
    else:
        start = ["--module", entrypoint.module or DEFAULT_MODULE]
    return [*start, "--", *(_literal(argument) for argument in job.spec.args)]


def environment(job: Job, attempt: int, node_rank: int, service: ServiceView) -> list[Manifest]:
    """The contract's variables first, so that a user's valueFrom cannot refer to something later, then the
    user's own.
    """
    own = {
        "DDPJOB_NAME": job.name,
        "DDPJOB_NAMESPACE": job.namespace,
        "DDPJOB_UID": job.uid,
        "DDPJOB_CREATED": str(int(job.created.timestamp())),
        "DDPJOB_ATTEMPT": str(attempt),
        "DDPJOB_NODE_RANK": str(node_rank),
        "DDPJOB_NODES": str(job.spec.nodes),
        "DDPJOB_PROCS_PER_NODE": str(job.spec.ranks_per_node),
        "DDPJOB_RDZV_HOST": service.host,
        "DDPJOB_RDZV_PORT": str(service.port),
        "DDPJOB_STATUS_PORT": str(STATUS_PORT),
        "DDPJOB_SHARED": SHARED_PATH,
        "DDPJOB_RUN_DIR": RUN_DIR,
        "DDPJOB_TERMINATION_LOG": "/dev/termination-log",
        "DDPJOB_SNAPSHOT_EVERY": job.spec.snapshots.every,
        "DDPJOB_SNAPSHOT_KEEP": str(job.spec.snapshots.keep),
    }
    downward = {
        "DDPJOB_POD_NAME": "metadata.name",
        "DDPJOB_NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
    }
    convenience = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108 - writable although the root is read-only
    users = {variable.name for variable in job.spec.env}
    return [
        *({"name": name, "value": value} for name, value in own.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in downward.items()),
        *({"name": name, "value": value} for name, value in convenience.items() if name not in users),
        *(_env_var(variable) for variable in job.spec.env),
    ]


def _env_var(variable: EnvVar) -> Manifest:
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": variable.value_from}
    return {"name": variable.name, "value": _literal(variable.value or "")}


def _literal(text: str) -> str:
    """As Kubernetes hands it on unchanged: it reads every `$$` as `$`, not only before a parenthesis."""
    return text.replace("$", "$$")


def merge(base: Manifest, over: Manifest) -> Manifest:
    """`over` merged into `base`: objects by key, lists of named things by name, everything else replaced.

    Lists are matched by the key that Kubernetes' strategic merge uses for them: `name`, or `mountPath` for volume
    mounts and `containerPort` for ports. A null removes what is not such a list.
    """
    merged = dict(base)
    for key, value in over.items():
        present = merged.get(key)
        if value is None:
            if not isinstance(present, list):
                merged.pop(key, None)
        elif isinstance(present, dict) and isinstance(value, dict):
            merged[key] = merge(present, value)
        elif isinstance(present, list) and isinstance(value, list) and (by := _merge_key(key)):
            merged[key] = _merge_list(present, value, by, deep=key in _CONTAINERS)
        else:
            merged[key] = value
    return merged


def _merge_key(field: str) -> str | None:
    if field in (*_CONTAINERS, "volumes", "env", "imagePullSecrets"):
        return "name"
    return {"volumeMounts": "mountPath", "ports": "containerPort"}.get(field)


def _merge_list(base: list[Any], over: list[Any], by: str, *, deep: bool) -> list[Any]:
    """Containers are merged; a volume or a variable has one source, so a later one replaces it whole."""
    merged = {item.get(by): item for item in base}
    for item in over:
        present = merged.get(item.get(by))
        merged[item.get(by)] = merge(present, item) if deep and present else item
    return list(merged.values())
