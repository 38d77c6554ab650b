"""What must not change once a job exists: a gang whose pods were made from two specs never finishes a rendezvous.

CEL refuses the edit where a server has it; elsewhere the operator notices it by digest.
"""

from __future__ import annotations

import hashlib
import json

from ddpjob_operator.api.spec import DDPJobSpec

FROZEN = (
    "image",
    "entrypoint",
    "args",
    "nodes",
    "elastic",
    "procsPerNode",
    "resources",
    "env",
    "shared",
    "initializers",
    "successPolicy",
    "scheduling",
    "placement",
    "managedBy",
    "podTemplate",
)
FROZEN_MESSAGE = (
    "cannot change once the job exists: delete the job and apply it again; "
    "with shared.retain it resumes from its last snapshot"
)


def frozen_digests(spec: DDPJobSpec) -> dict[str, str]:
    """A short digest of each frozen field, to notice an edit on a server without CEL.

    Defaults are left out: an operator that knows more fields than the last one finds the same digests.
    """
    wire = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    if spec.elastic is not None:
        wire.pop("nodes", None)  # the size of an elastic gang may change
    if spec.procs_per_node == 1:
        wire.pop("procsPerNode")  # it was the field's default once, and is written into stored objects
    return {
        field: hashlib.sha256(json.dumps(wire.get(field), sort_keys=True).encode()).hexdigest()[:12] for field in FROZEN
    }
