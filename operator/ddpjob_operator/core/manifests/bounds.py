"""What an administrator allows a job at most, and what it gets where it says nothing (`ddpjob_operator.tenancy`).

A new job beyond a bound is refused, with the field, its value and the bound; one that was created suspended, when it
resumes. One that has pods already is never stopped by a bound that came later; but an edit takes no job beyond one.

What counts is the pod that would be made, so that a podTemplate is no way around a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.manifests.allow_lists import unlisted
from ddpjob_operator.core.manifests.pod_security import HOST_NETWORK, pod_security_violations
from ddpjob_operator.core.transitions import has_had_gang
from ddpjob_operator.core.values.changes import resized
from ddpjob_operator.core.values.job import Bounds, Job, Manifest, Problem

BEYOND = "BeyondBounds"

ALWAYS_USED = ("cpu", "memory", "ephemeral-storage")
"""Resources of which a container takes what it gets unless it is limited; of any other it has what it asks for."""


_GPU = re.compile(
    r".+/gpu(\.shared)?|nvidia\.com/mig-.+|amd\.com/[sdtqc]px_nps\d+|gpu\.intel\.com/(i915|xe)|habana\.ai/gaudi"
)
"""Resources of device plugins: whole, shared, or in parts. Intel's has others, for monitoring."""


_UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


_QUANTITY = re.compile(
    rf"(?P<number>[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{{1,2}})?)(?P<unit>{'|'.join((*_BINARY, *_UNITS))})"
)


def bound_violations(job: Job, pods: tuple[Manifest, ...], bounds: Bounds) -> tuple[str, ...]:
    """Every bound that a job breaks, as messages with field, value and bound; `pods` has one pod of each kind."""
    return tuple(_beyond(job, pods, bounds))


def clamp_to_bounds(job: Job, bounds: Bounds) -> Job:
    """A job that has pods, or had them before it was suspended, held to the bound on its nodes: an edit may have taken
    an elastic one, or its spares, beyond it. Its attempt keeps the nodes that it has, which a bound may have come
    after. Spares get what is left: one that waits is worth less than a node that trains.
    """
    most, spec = bounds.max_nodes, job.spec
    if most is None or _is_new(job.status) or spec.nodes + spec.spares <= most:
        return job
    nodes = spec.nodes
    if spec.elastic is not None:
        # without a record of its spec, as of another version, the job is admitted anew, and not beyond the bound
        has = job.status.nodes.total if job.status.internal.spec_digests else 0
        nodes = min(nodes, max(most, spec.elastic.min_nodes, has))
    spares = min(spec.spares, max(0, most - nodes))
    if (nodes, spares) == (spec.nodes, spec.spares):
        return job  # it was here before the bound
    and_spares = f" and {spares} spares" if spec.spares else ""
    said = f"spec.nodes: {_too_many_nodes(job, bounds)}; the job goes on with at most {nodes}{and_spares}"
    clamped = resized(spec, nodes=nodes, spares=spares)
    return replace(job, spec=clamped, rejected_edit=job.rejected_edit or Problem(BEYOND, said))


def _is_new(status: DDPJobStatus) -> bool:
    """Whether the job is still to be admitted: that refuses it as it is."""
    created_suspended = status.phase is Phase.SUSPENDED and not has_had_gang(status)
    return created_suspended or status.phase in (None, Phase.PENDING)


def with_default_resources(
    container: Manifest, defaults: Mapping[str, Mapping[str, Any]], of_pod: Any = None
) -> Manifest:
    """A container with the default of each resource that neither it mentions at all nor `of_pod`, the resources of its
    pod as a whole (KEP-2837), which a container may not exceed.
    """
    given = container.get("resources") or {}
    if not defaults or not isinstance(given, dict):
        return container
    kinds = (kind for each in (given, of_pod) if isinstance(each, dict) for kind in each.values())
    mentioned = {name for kind in kinds if isinstance(kind, dict) for name in kind}
    filled = dict(given)
    for kind, quantities in defaults.items():
        missing = {name: value for name, value in quantities.items() if name not in mentioned}
        if missing:
            filled[kind] = missing | (given.get(kind) or {})
    return container | {"resources": filled}


def counts_on_whole(pod: Manifest, bounds: Bounds) -> bool:
    """Whether a container of the pod is within a bound by the limit of the pod as a whole alone (KEP-2837). Before
    Kubernetes 1.34 an API server leaves that out of the pod without a word, and nothing limits the container.
    """
    spec = pod["spec"]
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    names = [name for name in bounds.resources if name in ALWAYS_USED]
    try:
        together = [name for name in names if _most_used(spec, name) is not None]
        return any(_most_used(container, name) is None for name in together for container in containers)
    except ValueError:  # of a job from before the bound
        return True


def is_gpu(resource: str) -> bool:
    """Whether a resource of nodes is a GPU, or a part of one."""
    return _GPU.fullmatch(resource) is not None


def amount(quantity: str | int) -> Decimal:
    """A Kubernetes quantity as a number: 1.5Gi is 1610612736.

    Raises:
        ValueError: it is none.
    """
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        raise ValueError(f"{quantity!r} is not a quantity")
    number, unit = Decimal(found["number"]), found["unit"]
    return number * Decimal(1024) ** _BINARY[unit] if unit in _BINARY else number.scaleb(_UNITS[unit])


def _beyond(job: Job, pods: tuple[Manifest, ...], bounds: Bounds) -> Iterator[str]:
    spec = job.spec
    if not bounds.served:
        yield (
            f"metadata.namespace: {job.namespace} belongs to the cluster or to the operator, and a pod in it could use "
            "their service accounts; create the job in another namespace"
        )
    if bounds.max_nodes is not None and spec.nodes + spec.spares > bounds.max_nodes:
        yield f"spec.nodes: {_too_many_nodes(job, bounds)}; use fewer"
    ranks, most = spec.ranks_per_node, bounds.max_procs_per_node
    if most is not None and ranks > most:
        yield f"spec.procsPerNode: {ranks} is more than the {most} {_allowed(job)}; use fewer"
    for resource, bound in bounds.resources.items():
        yield from _first(_beyond_resource(job, pod, resource, bound) for pod in pods)
    if bounds.resources:
        yield from dict.fromkeys(message for pod in pods for message in _unlisted_resources(job, pod, bounds))
    yield from dict.fromkeys(message for pod in pods for message in _insecure(job, pod, bounds))
    yield from dict.fromkeys(
        f"{field}: {name!r} is not among those {_allowed(job)} (bounds.{setting}); use another, or remove it"
        for pod in pods
        for field, name, setting in unlisted(job, pod, bounds)
    )


def _insecure(job: Job, pod: Manifest, bounds: Bounds) -> Iterator[str]:
    level = bounds.pod_security
    for field, found in pod_security_violations(pod, level, bounds.host_network):
        place = f"{field} or spec.placement.hostNetwork" if field in HOST_NETWORK else field
        yield (
            f"{place}: {found} breaks the Pod Security Standard {level}, which this cluster's administrator "
            f"requires {_where(job)} (bounds.podSecurity); change it"
        )


def _unlisted_resources(job: Job, pod: Manifest, bounds: Bounds) -> Iterator[str]:
    """Devices that no bound names: another class of the same device would be a way around its bound."""
    holders = (pod["spec"], *(pod["spec"].get("initContainers") or ()), *(pod["spec"].get("containers") or ()))
    for holder in holders:
        resources = holder.get("resources")
        for kind in ("limits", "requests"):
            given = resources.get(kind) if isinstance(resources, dict) else None
            for name in given if isinstance(given, dict) else ():
                if name not in ALWAYS_USED and name not in bounds.resources:
                    yield (
                        f"spec.resources.{kind}[{name}]: is not among the resources {_allowed(job)} "
                        "(bounds.resources); remove it, or ask for it to be listed"
                    )


def _first(problems: Iterable[str | None]) -> Iterator[str]:
    """One is enough to say of each resource."""
    if (problem := next(filter(None, problems), None)) is not None:
        yield problem


def _beyond_resource(job: Job, pod: Manifest, resource: str, bound: str) -> str | None:
    field = f"spec.resources.limits[{resource}]"
    containers = [*(pod["spec"].get("initContainers") or ()), *(pod["spec"].get("containers") or ())]
    try:
        used = [_most_used(container, resource) for container in containers]
        together = _most_used(pod["spec"], resource)
    except ValueError as error:
        return f"{field}: {error}; write one such as 2, 500m, 16Gi"
    for container, quantity in zip(containers, used, strict=True):
        if quantity is None and together is None and resource in ALWAYS_USED:
            return (
                f"{field}: is not set for container {container.get('name')}, and a pod may use at most {bound} "
                f"{_where(job)}; set it"
            )
    total = max(_peak(pod["spec"], used), together or Decimal(0))
    if total > amount(bound):
        return f"{field}: a pod uses {_short(total, bound)}, more than the {bound} {_allowed(job)}; use less"
    return None


def _peak(spec: Manifest, used: list[Decimal | None]) -> Decimal:
    """The most that containers use at one time; `used` is of the init containers, then of the others.

    Init containers run one after the other; one with restartPolicy Always goes on running (KEP-753).
    """
    running = peak = Decimal(0)
    first = spec.get("initContainers") or ()
    for container, quantity in zip(first, used, strict=False):
        peak = max(peak, running + (quantity or 0))
        if container.get("restartPolicy") == "Always":
            running += quantity or 0
    return max(peak, running + sum(filter(None, used[len(first) :]), Decimal(0)))


def _most_used(container: Manifest, resource: str) -> Decimal | None:
    """What a container is limited to or, of what it has only if it asks, what it asks for; so a pod (KEP-2837)."""
    resources = container.get("resources")
    for kind in ("limits",) if resource in ALWAYS_USED else ("limits", "requests"):
        quantities = resources.get(kind) if isinstance(resources, dict) else None
        if isinstance(quantities, dict) and quantities.get(resource) is not None:
            given = amount(quantities[resource])
            # a limit of nothing is no limit: kubernetes/kubernetes#70017
            return given if given > 0 or resource not in ALWAYS_USED else None
    return None


def _too_many_nodes(job: Job, bounds: Bounds) -> str:
    spares = f" and spares {job.spec.spares}" if job.spec.spares else ""
    return f"{job.spec.nodes}{spares} is more than the {bounds.max_nodes} {_allowed(job)}"


def _allowed(job: Job) -> str:
    return f"that this cluster's administrator allows {_where(job)}"


def _where(job: Job) -> str:
    return f"in namespace {job.namespace}"


def _short(total: Decimal, like: str) -> str:
    """A number in the unit of another quantity."""
    found = _QUANTITY.fullmatch(like)
    unit = found["unit"] if found else ""
    return f"{(total / amount(f'1{unit}')).normalize():f}{unit}"
