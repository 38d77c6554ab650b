"""The pod that `ddpjob snapshots` starts to look at a job's volume, and deletes when it has the answer."""

from __future__ import annotations

from collections.abc import Sequence

from ddpjob_operator.core.manifests.merge import merge
from ddpjob_operator.core.manifests.pods import restricted_container, restricted_context
from ddpjob_operator.core.manifests.shared import confined, shared_mount, shared_volume
from ddpjob_operator.core.manifests.short_lived import LEAST, short_lived_metadata
from ddpjob_operator.core.values.job import Job, Manifest

CONTAINER = "snapshots"
ROLE = "snapshots"
LONGEST_SECONDS = 6 * 3600
"""After which it is stopped if the command has not deleted it: terabytes can be read in that time."""
GRACE_SECONDS = 5
_FROM_TEMPLATE = ("nodeSelector", "tolerations", "imagePullSecrets", "securityContext")
"""What it takes from the podTemplate: without it, it could not read the volume, or not pull the image."""
_RESOURCES = {"requests": LEAST, "limits": {"cpu": "1", "memory": "1Gi"}}
"""Files are read in pieces."""


def build_snapshot_pod(job: Job, image: str, arguments: Sequence[str], *, writes: bool) -> Manifest:
    """Runs `python -m ddp_trainer.snapshots` in `image`; unless it `writes`, the volume of `job` is read-only in it."""
    template = job.spec.pod_template
    given = (template.spec if template else None) or {}
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LONGEST_SECONDS,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": restricted_context(),
    }
    spec = merge(spec, {name: given[name] for name in _FROM_TEMPLATE if name in given})
    container: Manifest = {
        "name": CONTAINER,
        "image": image,
        "command": ["python", "-m", "ddp_trainer.snapshots"],
        "args": list(arguments),
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - a mount of the pod
        "resources": _RESOURCES,
        "securityContext": restricted_container(),
        "volumeMounts": [
            shared_mount() | {"readOnly": not writes},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        ],
    }
    spec |= {"containers": [container], "volumes": [shared_volume(job), {"name": "tmp", "emptyDir": {}}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": short_lived_metadata(job, ROLE), "spec": confined(job, spec)}
