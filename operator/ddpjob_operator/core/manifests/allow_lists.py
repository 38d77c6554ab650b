"""What a pod may name of the cluster: accounts, classes, schedulers, kinds of volumes, annotations.

A list that an administrator gives is complete: what it lacks is refused. Without one anything goes, but for what is the
cluster's own: priority classes `system-*`, and, where resources are bounded, devices by resource claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ddpjob_operator.core.manifests.code import VOLUME as CODE
from ddpjob_operator.core.manifests.placement import LOST_NODE_TAINTS
from ddpjob_operator.core.manifests.pod_security import TEMPLATE, volume_types
from ddpjob_operator.core.manifests.shared import copied_claims, other_claims, paths_within, source_claim
from ddpjob_operator.core.values.job import Bounds, Job, Manifest

SPEC = f"{TEMPLATE}.spec"
OURS = ("persistentVolumeClaim", "emptyDir", "downwardAPI")
"""Kinds of the volumes that every pod of a gang has."""
_CREDENTIALS = frozenset({"serviceAccountToken", "podCertificate"})
"""Projected sources that say who a pod is: its account (KEP-4317 for the certificate)."""

Named = Iterable[tuple[str, str]]
"""Fields, and what they name."""


class AllowList(NamedTuple):
    """One kind of thing that a pod names. `setting` is its list below `bounds`."""

    setting: str
    names: Callable[[Job, Manifest], Named]


def unlisted(job: Job, pod: Manifest, bounds: Bounds) -> Iterator[tuple[str, str, str]]:
    """Each field of a pod that names what no list allows, with the name and the setting."""
    for row in ALLOW_LISTS:
        allowed = bounds.allowed.get(row.setting)
        for field, name in row.names(job, pod):
            if not (_is_open(row.setting, name, bounds) if allowed is None else _is_listed(name, allowed)):
                yield field, name, row.setting


def may_see_whole_claims(bounds: Bounds) -> bool:
    """Whether jobs may see all of a claim that was not made for them."""
    allowed = bounds.allowed.get("sharedScopes")
    return allowed is None or _is_listed("Claim", allowed)


def _is_open(setting: str, name: str, bounds: Bounds) -> bool:
    if setting == "priorityClasses":
        return not name.startswith("system-")
    return setting != "resourceClaims" or not bounds.resources


def _is_listed(name: str, allowed: Iterable[str]) -> bool:
    """An entry that ends with `*` stands for every name that begins like it."""
    return any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in allowed)


def _field(name: str) -> Callable[[Job, Manifest], Named]:
    def named(_: Job, pod: Manifest) -> Named:
        if value := pod["spec"].get(name):
            yield f"{SPEC}.{name}", str(value)

    return named


def _service_accounts(_: Job, pod: Manifest) -> Named:
    named = False
    for name in ("serviceAccountName", "serviceAccount"):  # the second is its old name, and still counts
        if value := pod["spec"].get(name):
            named = True
            yield f"{SPEC}.{name}", str(value)
    if not named and _has_token(pod):
        yield f"{SPEC}.serviceAccountName", "default"


def _has_token(pod: Manifest) -> bool:
    """Whether a pod has credentials of its account: mounted unless it says no, or in a volume of its own."""
    if pod["spec"].get("automountServiceAccountToken") is not False:
        return True
    projected = (volume.get("projected") for volume in _objects(pod["spec"].get("volumes")))
    sources = (source for found in projected if isinstance(found, dict) for source in _objects(found.get("sources")))
    return any(_CREDENTIALS & source.keys() for source in sources)


def _priority_classes(job: Job, pod: Manifest) -> Named:
    """That of a PodGroup too, which a template does not override."""
    of_group, of_pod = job.spec.scheduling.priority_class_name, pod["spec"].get("priorityClassName")
    if of_group:
        yield "spec.scheduling.priorityClassName", of_group
    if of_pod and of_pod != of_group:
        yield f"{SPEC}.priorityClassName", str(of_pod)


def _volumes(job: Job, pod: Manifest) -> Named:
    for volume in _objects(pod["spec"].get("volumes")):
        if volume.get("name") == CODE and job.spec.code is not None:
            continue  # made from ConfigMaps of the job's namespace alone, whatever a podTemplate has of this name
        for kind in sorted(volume_types(volume) - frozenset(OURS)):
            yield f"{SPEC}.volumes[{volume.get('name')}]", kind


def _annotations(job: Job, _: Manifest) -> Named:
    """Of the template alone: the operator adds those of a gang scheduler."""
    template = job.spec.pod_template
    given = (template.metadata.annotations if template and template.metadata else None) or {}
    return ((f"{TEMPLATE}.metadata.annotations", name) for name in given)


def _tolerations(_: Job, pod: Manifest) -> Named:
    """Without those that every pod has."""
    for item in _objects(pod["spec"].get("tolerations")):
        key = str(item.get("key") or "*")
        if key not in LOST_NODE_TAINTS or item.get("tolerationSeconds") is None:
            yield f"{SPEC}.tolerations", key


def _resource_claims(_: Job, pod: Manifest) -> Named:
    for claim in _objects(pod["spec"].get("resourceClaims")):
        source = claim.get("source") if isinstance(claim.get("source"), dict) else claim
        for kind in ("resourceClaimName", "resourceClaimTemplateName"):
            if isinstance(source, dict) and source.get(kind):
                yield f"{SPEC}.resourceClaims[{claim.get('name')}]", str(source[kind])


def _shared_scopes(job: Job, pod: Manifest) -> Named:
    """What pods see of claims that they did not get for themselves: another claim is seen whole."""
    if job.spec.shared.claim_name is not None:
        yield "spec.shared.scope", job.spec.shared.scope or "Claim"
    sources = {claim for item in job.spec.initializers if (claim := source_claim(item)) is not None}
    for name, claim in other_claims(job, pod["spec"]).items():
        yield f"spec.initializers, pvc://{claim}" if claim in sources else f"{SPEC}.volumes[{name}]", "Claim"
    for name in copied_claims(pod["spec"]):
        yield f"{SPEC}.volumes[{name}].ephemeral", "Claim"
    for field, _ in paths_within(job, pod["spec"]):
        yield f"{SPEC}.{field}", "Claim"


def _objects(value: Any) -> Iterator[Manifest]:
    yield from (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))


ALLOW_LISTS = (
    AllowList("serviceAccounts", _service_accounts),
    AllowList("priorityClasses", _priority_classes),
    AllowList("schedulers", _field("schedulerName")),
    AllowList("runtimeClasses", _field("runtimeClassName")),
    AllowList("volumeTypes", _volumes),
    AllowList("sharedScopes", _shared_scopes),
    AllowList("annotations", _annotations),
    AllowList("tolerations", _tolerations),
    AllowList("nodeNames", _field("nodeName")),
    AllowList("resourceClaims", _resource_claims),
)
SETTINGS = tuple(row.setting for row in ALLOW_LISTS)
