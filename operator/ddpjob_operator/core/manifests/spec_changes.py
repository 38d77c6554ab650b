"""What a gang was made from, as digests in the status: to notice that the spec has changed since.

Two kinds of change matter. A frozen field must not change while the job runs (CEL refuses it where a server has it).
Another one may, but pods that were made before it know nothing of it: they cannot be kept for the next attempt, and no
pod that is made after it can take part in this one. Ranks that save at other steps than the others wait for ever.

Some fields of `restart` that pods, or their group, are made from matter to none of this: backoff.maxSeconds,
nodeLostSeconds and forceDeleteLostPods. Pods from before and after an edit of these take part in one attempt, and it
holds for those that are made after it.
"""

from __future__ import annotations

import hashlib
import json

from ddpjob_operator.api.immutable import OF_NOTHING, immutable_digests
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.manifests.pod_environment import is_assignable
from ddpjob_operator.core.values.job import Defaults, Job

PODS = "pods"
"""Key of the digest of what pods are made from besides the frozen fields."""


def digests(job: Job, defaults: Defaults) -> dict[str, str]:
    """What goes on record with each attempt, before any pod is created for it."""
    return immutable_digests(job.spec) | {PODS: _of_pods(job, defaults)}


def made_otherwise(job: Job, status: DDPJobStatus, defaults: Defaults) -> bool:
    """Whether a pod that is made now would differ from those that the current attempt was started with."""
    started_with = status.internal.spec_digests
    if not started_with:
        return False
    return any(started_with.get(name, digest) != digest for name, digest in digests(job, defaults).items())


def made_alike(job: Job, status: DDPJobStatus, defaults: Defaults) -> bool:
    """Whether the pods of the current attempt are known to be like one that is made now. What the operator that began
    it did not know had its default then.
    """
    started_with = status.internal.spec_digests
    if started_with is None:
        return False
    now = digests(job, defaults)
    names = started_with.keys() | now.keys()
    return all(started_with.get(name, OF_NOTHING) == now.get(name, OF_NOTHING) for name in names)


def edited_fields(job: Job, status: DDPJobStatus) -> list[str]:
    """Immutable fields that are not what the current attempt was started with."""
    started_with = status.internal.spec_digests
    if started_with is None:
        return []
    return [name for name, digest in immutable_digests(job.spec).items() if started_with.get(name, digest) != digest]


def _of_pods(job: Job, defaults: Defaults) -> str:
    wire = job.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude_defaults=True,
        include={"snapshots", "stall", "observe_script", "shutdown_seconds", "non_finite_loss_policy"},
    )
    parts: list[object] = [job.spec.image or defaults.trainer_image, is_assignable(job), wire]
    if job.spec.restart.scope == "Live":
        parts.append("live")
    if defaults.resources:
        parts.append({kind: dict(quantities) for kind, quantities in defaults.resources.items()})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
