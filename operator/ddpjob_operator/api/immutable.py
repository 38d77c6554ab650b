"""Immutable fields of `spec`. Pods that were created from two different specs could not form one process group.

API servers with CEL reject such an edit. On older servers the operator detects it by comparing digests.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ddpjob_operator.api.spec import DDPJobSpec

IMMUTABLE_FIELDS = (
    "image",
    "entrypoint",
    "code",
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
IMMUTABLE_ADVICE = "delete the job and apply it again; with shared.retain it resumes from its last snapshot"
IMMUTABLE_MESSAGE = f"is immutable: {IMMUTABLE_ADVICE}"


def immutable_digests(spec: DDPJobSpec) -> dict[str, str]:
    """A short digest of each immutable field, to detect an edit on a server without CEL.

    Fields with their default value are left out, so that a newer operator with more fields computes the same digests.
    """
    wire = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    if spec.elastic is not None:
        wire.pop("nodes", None)  # the number of nodes of an elastic job may change
    if spec.procs_per_node == 1:
        wire.pop("procsPerNode")  # it was the field's default once, and is written into stored objects
    return {field: _digest(wire[field]) if field in wire else OF_NOTHING for field in IMMUTABLE_FIELDS}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


OF_NOTHING = _digest(None)
"""Of a field that has its default: most fields of most jobs, at each look at them."""
