"""The pod that `ddpjob snapshots` and `ddpjob logs` start to look at a job's volume, and delete when they have the
answer. It runs a command of the trainer in the trainer's image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.core.manifests.bounds import amount
from ddpjob_operator.core.manifests.merge import merge
from ddpjob_operator.core.manifests.pod_user import noted_user
from ddpjob_operator.core.manifests.pods import restricted_container, restricted_context
from ddpjob_operator.core.manifests.shared import VOLUME, confined, shared_mount, shared_volume
from ddpjob_operator.core.manifests.short_lived import LEAST, claim_metadata, short_lived_metadata
from ddpjob_operator.core.values.job import Job, Manifest

LONGEST_SECONDS = 6 * 3600
"""After which it is stopped if the command has not deleted it: terabytes can be read in that time."""
GRACE_SECONDS = 5
_FROM_TEMPLATE = (
    "automountServiceAccountToken", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName",
    "tolerations",
)  # fmt: skip
"""What it takes from the podTemplate: without it, it could not read the volume, or not pull the image. What webhooks
inject, such as the proxy that mounts a bucket, logs in with the account. The scheduler knows where the volume can be,
and not on which nodes its driver runs, nor for which processors the image is: nodes of the job are known to be right.
"""
_MEMORY = "1Gi"
"""Enough where files are read in pieces."""


@dataclass(frozen=True, slots=True)
class VolumeCommand:
    """A command of the trainer, `python -m <module> <argument>…`."""

    role: str
    """What the pod is for, in one word: its container's name, and in its own name and label."""
    module: str
    arguments: tuple[str, ...]
    writes: bool = False
    """Without it the volume is read-only in the pod."""
    loads: bool = False
    """Whether it loads a snapshot: its pod then may use as much memory as a pod that trains."""


def build_volume_pod(job: Job, image: str, command: VolumeCommand) -> Manifest:
    """Runs `command` in `image` with the volume of `job`."""
    template = job.spec.pod_template
    given = (template.spec if template else None) or {}
    taken = {name: given[name] for name in _FROM_TEMPLATE if name in given}
    spec = merge(_spec(image, command, shared_volume(job), _memory(job) if command.loads else _MEMORY), taken)
    metadata = short_lived_metadata(job, command.role, command.role)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": confined(job, spec)}


def build_claim_pod(claim: Mapping[str, Any], image: str, command: VolumeCommand) -> Manifest:
    """The same with a claim whose job is gone, as the user that is noted on the claim. It sees all of the claim, like
    any pod of the namespace."""
    volume = {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    metadata = claim_metadata(claim["metadata"], command.role)
    user = noted_user(claim["metadata"].get("annotations") or {})
    spec = merge(_spec(image, command, volume), {"securityContext": user})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _memory(job: Job) -> str | int | None:
    """What holds the states of a rank holds those of its snapshot; None: no limit, as `spec.resources` has none."""
    resources = job.spec.resources
    limit = ((resources.limits if resources else None) or {}).get("memory")
    return _MEMORY if limit is not None and amount(limit) < amount(_MEMORY) else limit


def _spec(image: str, command: VolumeCommand, volume: Manifest, memory: str | int | None = _MEMORY) -> Manifest:
    container: Manifest = {
        "name": command.role,
        "image": image,
        "command": ["python", "-m", command.module],
        "args": list(command.arguments),
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - a mount of the pod
        "resources": {"requests": LEAST, "limits": {"cpu": "1"} | ({} if memory is None else {"memory": memory})},
        "securityContext": restricted_container(),
        "volumeMounts": [
            shared_mount() | {"readOnly": not command.writes},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LONGEST_SECONDS,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": restricted_context(),
        "containers": [container],
        "volumes": [volume, {"name": "tmp", "emptyDir": {}}],
    }
