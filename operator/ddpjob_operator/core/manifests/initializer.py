"""The pod that runs the initializers: one container each, so that each has its own credentials.

Init containers run one after the other (Kubernetes); the last initializer is the pod's main container.
"""

from __future__ import annotations

from ddpjob_operator.api.initializer_rules import as_document
from ddpjob_operator.api.pod import Initializer
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.bounds import ALWAYS_USED, is_gpu, with_default_resources
from ddpjob_operator.core.manifests.code import VOLUME as CODE
from ddpjob_operator.core.manifests.merge import merge
from ddpjob_operator.core.manifests.placement import leaving_lost_nodes
from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH, TERMINATION_LOG, env_var, literal
from ddpjob_operator.core.manifests.pods import (
    restricted_container,
    restricted_context,
    users_annotations,
    users_labels,
    without_gang,
    without_networks,
)
from ddpjob_operator.core.manifests.shared import confined, shared_mount, shared_volume, source_claim
from ddpjob_operator.core.values.job import Defaults, Job, Manifest
from ddpjob_operator.core.values.names import (
    INITIALIZER,
    LABEL_ATTEMPT,
    LABEL_LAST_INITIALIZER,
    LABEL_ROLE,
    TRAINER_CONTAINER,
    initializer_name,
    job_labels,
)

SOURCES_PATH = "/mnt/source"
"""Where claims that data is copied from are mounted, each under its name."""


_OF_THE_GANG = (
    "containers", "initContainers", "affinity", "topologySpreadConstraints", "schedulingGates", "resourceClaims",
    "resources", "schedulingGroup", "workloadRef", "activeDeadlineSeconds",
)  # fmt: skip
"""What the podTemplate says of the pods that train, and of no other. A claim of devices (DRA) is allocated to a pod
whether a container of it uses them or not. `resources` are those of the pod as a whole (KEP-2837). A group of pods
(KEP-4671; `workloadRef` in 1.35) is scheduled when all of the gang are there, which waits for the data.
`activeDeadlineSeconds` is how long they may train.
"""


def build_initializer(admitted: Admitted, number: int) -> Manifest:
    """The pod that runs the initializers for the nth time, from 0."""
    job, defaults = admitted.job, admitted.defaults
    template = job.spec.pod_template
    user_spec = (template.spec if template else None) or {}
    claims = sorted({claim for item in job.spec.initializers if (claim := source_claim(item)) is not None})
    volumes = {claim: f"source-{index}" for index, claim in enumerate(claims)}
    *first, last = [_container(job, item, defaults, volumes) for item in job.spec.initializers]
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
        "securityContext": restricted_context(),
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    spec = merge(spec, {name: value for name, value in user_spec.items() if name not in _OF_THE_GANG})
    if job.spec.code is not None:  # as in the pods of the gang, where the operator's takes its place
        spec["volumes"] = [volume for volume in spec["volumes"] if volume.get("name") != CODE]
    sources = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, name in volumes.items()
    ]
    spec = merge(spec, {"restartPolicy": "Never", "containers": [last], "volumes": [shared_volume(job), *sources]})
    if first:
        spec["initContainers"] = first
    spec = confined(job, spec)
    own = job_labels(job.name, job.uid) | {
        LABEL_ROLE: INITIALIZER,
        LABEL_ATTEMPT: str(number),
        LABEL_LAST_INITIALIZER: last["name"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": initializer_name(job.name, number),
            "namespace": job.namespace,
            "labels": without_gang(template, users_labels(template)) | own,
            "annotations": _annotations(job),
            "ownerReferences": [admitted.owner_reference()],
        },
        "spec": leaving_lost_nodes(spec, job.spec.restart.node_lost_seconds),
    }


def _annotations(job: Job) -> dict[str, str]:
    """Those of the podTemplate. Data may come over a further network, but not over one that is a device of the gang."""
    template = job.spec.pod_template
    given = without_gang(template, users_annotations(template, *(item.name for item in job.spec.initializers)))
    containers = ((template.spec if template else None) or {}).get("containers") or ()
    resources = [item.get("resources") or {} for item in containers if item["name"] == TRAINER_CONTAINER]
    limits = [(job.spec.resources.limits if job.spec.resources else None) or {}]
    limits += [item.get("limits") or {} for item in resources]
    devices = {name for one in limits for name in one if "/" in name and not is_gpu(name)}
    return without_networks(given) if devices else given


def _container(job: Job, item: Initializer, defaults: Defaults, volumes: dict[str, str]) -> Manifest:
    own = {
        "DDPJOB_INITIALIZER": literal(as_document(item)),
        "DDPJOB_SHARED": SHARED_PATH,
        "DDPJOB_SOURCES": SOURCES_PATH,
        "DDPJOB_TERMINATION_LOG": TERMINATION_LOG,
    }
    users = [variable for variable in item.env if variable.name not in own]
    if not any(variable.name == "HOME" for variable in users):
        own["HOME"] = "/tmp"  # noqa: S108 - writable although the root is read-only
    mounts: list[Manifest] = [
        shared_mount(),
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the pod
    ]
    if (claim := source_claim(item)) is not None:
        mounts.append({"name": volumes[claim], "mountPath": f"{SOURCES_PATH}/{claim}", "readOnly": True})
    container: Manifest = {
        "name": item.name,
        "image": job.spec.image or defaults.trainer_image,
        "command": ["python", "-m", "ddp_trainer.initialize"],
        "env": [*map(env_var, users), *({"name": name, "value": value} for name, value in own.items())],
        "securityContext": restricted_container(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }
    return with_default_resources(with_default_resources(container, defaults.resources), _bounded(defaults))


def _bounded(defaults: Defaults) -> dict[str, dict[str, str]]:
    """Default resources of an initializer: a limit of as much as a pod may use, and nothing reserved."""
    bounds = {name: most for name, most in defaults.bounds.resources.items() if name in ALWAYS_USED}
    return {"limits": bounds, "requests": dict.fromkeys(bounds, "0")} if bounds else {}
