"""What a gang was made from, as digests in the status: to notice that the spec has changed since.

Two kinds of change matter. A frozen field must not change while the job runs (CEL refuses it where a server has it).
Another one may, but pods that were made before it know nothing of it: they cannot be kept for the next attempt.
"""

from __future__ import annotations

import hashlib
import json

from ddpjob_operator.api.immutable import immutable_digests
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.gang.members import members
from ddpjob_operator.core.manifests.admission import edited_fields
from ddpjob_operator.core.manifests.pod_environment import is_assignable
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.look import Look

PODS = "pods"
"""Key of the digest of what pods are made from besides the frozen fields."""


def digests(job: Job, defaults: Defaults) -> dict[str, str]:
    """What goes on record with each attempt, before any pod is created for it."""
    return immutable_digests(job.spec) | {PODS: _of_pods(job, defaults)}


def edited_while_starting(look: Look) -> bool:
    """An incomplete gang must not be completed from another spec (a server with CEL refuses such an edit)."""
    starting = look.status.phase in (Phase.STARTING, Phase.RESTARTING)
    return starting and len(members(look)) < look.gang_size and bool(edited_fields(look.job, look.status))


def pods_are_up_to_date(look: Look) -> bool:
    """Whether new pods would be like those that are there, so that the two make one gang."""
    return look.status.internal.spec_digests == digests(look.job, look.defaults)


def _of_pods(job: Job, defaults: Defaults) -> str:
    wire = job.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude_defaults=True,
        include={"snapshots", "stall", "observe_script"},
    )
    parts: list[object] = [job.spec.image or defaults.trainer_image, is_assignable(job), wire]
    if defaults.resources:
        parts.append({kind: dict(quantities) for kind, quantities in defaults.resources.items()})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
