"""Which user and groups a pod runs as, noted on a claim for the time when no job says it any more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import ANNOTATION_USER

_FIELDS = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
_LARGEST = 2**31 - 1


def user_note(job: Job) -> dict[str, str]:
    """The annotation of a claim of `job`; empty where its podTemplate asks for no other user."""
    given = (job.spec.pod_template.spec if job.spec.pod_template else None) or {}
    if "securityContext" not in given:
        return {}
    context = given["securityContext"]
    asked = dict.fromkeys(_FIELDS) if context is None else {name: context[name] for name in _FIELDS if name in context}
    return {ANNOTATION_USER: json.dumps(asked, sort_keys=True)} if asked else {}


def noted_user(annotations: Mapping[str, str]) -> Manifest:
    """The part of a pod's security context that such an annotation names. A null leaves the choice to the cluster.

    Who may change a claim need not be allowed to start pods: root is not taken from it.
    """
    try:
        noted = json.loads(annotations.get(ANNOTATION_USER) or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(noted, dict):
        return {}
    return {name: noted[name] for name in _FIELDS if name in noted and _is_taken(name, noted[name])}


def _is_taken(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name == "supplementalGroups":
        return isinstance(value, list) and all(map(_is_id, value))
    return _is_id(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST
