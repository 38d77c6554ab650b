"""What the API server says no to, in words for the author of the job: which object, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpjob_operator.core.manifests.bounds import BEYOND
from ddpjob_operator.core.values.job import (
    ADMISSION_DENIED,
    ADMISSION_FAILED,
    NAME_TAKEN,
    NAMESPACE_TERMINATING,
    QUOTA_EXCEEDED,
    TOO_LARGE,
    Problem,
)
from ddpjob_operator.core.values.names import DOMAIN, LABEL_MANAGED_BY
from ddpjob_operator.runtime.client import Json
from ddpjob_operator.runtime.errors import ApiError

_REFUSALS = frozenset({400, 403, 404, 422})
"""Answers to a create that say no to this object, rather than not now."""


_PLUGIN = re.compile(r"tolerations\b.{0,60} conflict\b")
"""What PodTolerationRestriction says, as an error without a status: the API server answers 500."""
_PATCH = re.compile(r"(add|remove|replace|move|copy|test) operation does not apply|error in \w+ for path:")
"""A webhook's patch does not fit the object (evanphx/json-patch): the API server answers 500, and names no webhook."""


class Rejected(Exception):
    """The API server will not have a child of the job, and answered with HTTP `status`."""

    def __init__(self, problem: Problem, *, status: int = 0) -> None:
        super().__init__(f"{problem.reason}: {problem.message}")
        self.problem = problem
        self.status = status


def problem_of(manifest: Json, error: ApiError) -> Problem:
    """A refusal in words for people: which object, why, in the API server's own terms."""
    what = f"{manifest['kind']} {manifest['metadata']['name']}"
    return Problem(_reason(error), f"the API server rejected {what}: {error.message}")


def _reason(error: ApiError) -> str:
    if error.namespace_terminating:
        return NAMESPACE_TERMINATING
    if "exceeded quota" in error.message:
        return QUOTA_EXCEEDED
    if _has_bad_patch(error) or "failed calling webhook" in error.message or (error.denied and _is_a_failure(error)):
        return ADMISSION_FAILED
    if error.denied or _breaks_plugin(error):
        return ADMISSION_DENIED
    if error.too_large:
        return TOO_LARGE
    return error.reason or "Rejected"


def refuses(error: ApiError) -> bool:
    return error.status in _REFUSALS or _by_admission(error) or error.denied or error.too_large


def problem_with(name: str, error: ApiError) -> Problem:
    """The same for a change of an object that is there, by its name."""
    return Problem(_reason(error), f"the API server rejected a change of {name}: {error.message}")


def forbids(error: ApiError) -> bool:
    """Whether a change of an object that is there is refused by a rule: a policy, a role, validation."""
    return error.status in (403, 422) or _by_admission(error) or error.denied or error.too_large


def _is_a_failure(error: ApiError) -> bool:
    """Whether a webhook denies what it could not judge, as controller-runtime's `Errored(500, …)` does."""
    return error.status == 429 or error.status >= 500


def _by_admission(error: ApiError) -> bool:
    return _has_no_webhook(error) or _has_bad_patch(error) or _breaks_plugin(error)


def _has_bad_patch(error: ApiError) -> bool:
    return error.status == 500 and _PATCH.search(error.message) is not None


def _breaks_plugin(error: ApiError) -> bool:
    return error.status == 500 and _PLUGIN.search(error.message) is not None


def _has_no_webhook(error: ApiError) -> bool:
    return error.status == 500 and "failed calling webhook" in error.message


def changed_labels(wanted: Json, found: Json, *, created: bool) -> tuple[str, ...]:
    """Labels by which the operator, its Service and its policies know a pod, and which `found` has not as it was to be
    made. Of one that was not `created` now, those of its place may have changed since.
    """
    labels, has = wanted["metadata"].get("labels") or {}, found["metadata"].get("labels") or {}
    ours = [name for name in labels if name == LABEL_MANAGED_BY or (created and name.startswith(f"{DOMAIN}/"))]
    return tuple(name for name in ours if has.get(name) != labels[name])


def relabelled(kind: str, obj: Json, names: Sequence[str]) -> Problem:
    """A policy of the cluster has taken a pod out of the operator's sight."""
    said = f"{kind} {obj['metadata']['name']} lacks what the operator sets as its label {' and '.join(names)}"
    what = "an admission webhook or policy that changes labels has to leave out those of the operator"
    return Problem(ADMISSION_DENIED, f"{said}, and was deleted: {what}")


def keeps_whole(wanted: Json, found: Json) -> bool:
    """Whether a pod has each limit of the pod as a whole (KEP-2837) that it was to have."""
    limits, kept = (((pod.get("spec") or {}).get("resources") or {}).get("limits") or {} for pod in (wanted, found))
    return set(limits) <= set(kept)


def without_whole(manifest: Json) -> Problem:
    """An API server that does not know these limits, while a bound of the administrator counts on them."""
    said = f"Pod {manifest['metadata']['name']}: the API server leaves out spec.podTemplate.spec.resources.limits"
    which = "which Kubernetes has from 1.34 on, so nothing would hold its containers to the bounds of this namespace"
    return Problem(BEYOND, f"{said}, {which}; set limits of each container")


def without_address(service: Json) -> Problem | None:
    """Somebody has edited the rendezvous Service: one of type ExternalName has no address, and need have no port."""
    spec = service["spec"]
    if spec.get("clusterIP") and spec.get("ports"):
        return None
    said = f"Service {service['metadata']['name']} was edited: its type is {spec.get('type')}"
    why = "which has no spec.clusterIP or spec.ports"
    return Problem("Invalid", f"{said}, {why}; delete it, and the operator creates it again")


def not_made_for(claim: Json) -> Problem:
    """A claim that has the name of the job's own, where jobs may not see all of any other one."""
    said = f"PersistentVolumeClaim {claim['metadata']['name']} already exists and was made for no job of this name"
    return Problem(NAME_TAKEN, f"{said}; give the job another name, or use it with shared.claimName and scope Job")


def taken(kind: str, obj: Json) -> Problem:
    """The name of a child is that of an object of another owner, such as the job that this one has replaced."""
    meta = obj["metadata"]
    if meta.get("deletionTimestamp"):
        said = "of an earlier job is still being deleted; this job goes on when it is gone"
    else:
        said = "already exists and does not belong to this job; delete it, or give the job another name"
    return Problem(NAME_TAKEN, f"{kind} {meta['name']} {said}")
