"""Whether the namespace has room for a job, and lets its pods in: quota, limits, Pod Security."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from ddpjob_operator.core.manifests.bounds import amount, is_gpu
from ddpjob_operator.core.manifests.pods import DEFAULT_SIZE
from ddpjob_operator.follow.doctor.facts import Facts, Unread
from ddpjob_operator.follow.doctor.findings import Finding, ok, problem, unknown, warning
from ddpjob_operator.follow.doctor.nodes import in_units
from ddpjob_operator.wire.objects import Object

ENFORCE = "pod-security.kubernetes.io/enforce"
_COMPUTE = ("cpu", "memory")
_EVERY_JOB = frozenset(
    {
        "pods", "count/pods", "services", "count/services", "persistentvolumeclaims", "count/persistentvolumeclaims",
        "count/ddpjobs.training.ddpjob.io", "cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu",
        "limits.memory", "requests.storage", "configmaps", "count/configmaps",
    }
)  # fmt: skip
"""What a quota may count that every job takes some of."""


def pod_security(facts: Facts) -> Finding:
    """What the namespace enforces; pods of a job meet `restricted`, unless its podTemplate takes that away."""
    check, space = "pod security", facts.space
    if isinstance(space, Unread):
        return unknown(check, space)
    if space is None:
        return problem(
            check,
            f"there is no namespace {facts.namespace}",
            f"kubectl create namespace {facts.namespace}, or name another one with -n",
        )
    if (space.get("status") or {}).get("phase") == "Terminating":
        return problem(check, f"the namespace {facts.namespace} is being deleted", "name another one with -n")
    enforced = (facts.space_labels or {}).get(ENFORCE)
    if enforced is None:
        return ok(check, "the namespace enforces no profile; pods of a job meet restricted")
    return ok(check, f"{enforced} is enforced; pods of a job meet restricted as long as podTemplate changes nothing")


def quota(facts: Facts) -> Finding:
    """What the ResourceQuotas leave, and whether pods have to name resources for them."""
    if isinstance(facts.quotas, Unread):
        return unknown("quota", facts.quotas)
    if not facts.quotas:
        return ok("quota", "the namespace has no ResourceQuota")
    left = [(item, name, *pair) for item in facts.quotas for name, pair in _left(item).items()]
    used_up = [(quota, name) for quota, name, free, _ in left if free <= 0]
    stopping = [name for quota, name in used_up if name in _EVERY_JOB and not _scoped(quota)]
    if stopping:
        return problem(
            "quota",
            f"nothing is left of {', '.join(dict.fromkeys(stopping))} in namespace {facts.namespace}",
            "delete what has ended (kubectl get pods,pvc,ddpjobs), or ask for a larger quota",
        )
    if used_up:
        names = ", ".join(dict.fromkeys(name for _, name in used_up))
        return warning("quota", f"nothing is left of {names}", "use none of it, or ask for a larger quota")
    if unstated := sorted({name for item in facts.quotas for name in _must_be_stated(item, facts.limits)}):
        return warning(
            "quota",
            f"pods that do not name {', '.join(unstated)} are refused",
            "set spec.resources in each job, or resources in the operator's tenancy",
        )
    amounts = (f"{in_units(name, free)} of {in_units(name, hard)} {name}" for _, name, free, hard in left)
    return ok("quota", f"left: {', '.join(amounts)}")


def limits(facts: Facts) -> Finding:
    """What the LimitRanges make of a job that names no resources, and whether its claim is allowed."""
    if isinstance(facts.limits, Unread):
        return unknown("limits", facts.limits)
    items = list(_items(facts.limits))
    claims = [item for item in items if item.get("type") == "PersistentVolumeClaim"]
    size = amount(DEFAULT_SIZE)
    for item in claims:
        most, least = ((item.get(bound) or {}).get("storage") for bound in ("max", "min"))
        if most is not None and amount(most) < size:
            said = f"claims of more than {most} are refused, and a job asks for {DEFAULT_SIZE}"
            return problem("limits", said, f"shared.size: {most}, or shared.claimName")
        if least is not None and amount(least) > size:
            said = f"claims of less than {least} are refused, and a job asks for {DEFAULT_SIZE}"
            return problem("limits", said, f"shared.size: {least}, or shared.claimName")
    bounds = [
        f"{words} {name} {value}"
        for item in items
        if item.get("type") in ("Container", "Pod")
        for field, words in (("default", "by default at most"), ("max", "never more than"))
        for name, value in (item.get(field) or {}).items()
    ]
    if any(item.get("type") == "Container" and "memory" in (item.get("default") or {}) for item in items):
        return warning(
            "limits",
            f"a LimitRange bounds a job that names no resources: {', '.join(bounds)}",
            "set spec.resources in each job to what it uses",
        )
    return ok("limits", f"containers get {', '.join(bounds)}" if bounds else "no LimitRange bounds pods or claims")


def _left(quota: Object) -> dict[str, tuple[Decimal, Decimal]]:
    """Of each resource, what is left and the whole. What has not been counted yet is not used."""
    status = quota.get("status") or {}
    hard, used = status.get("hard") or (quota.get("spec") or {}).get("hard") or {}, status.get("used") or {}
    return {
        name: (amount(most) - amount(used.get(name, 0)), amount(most))
        for name, most in hard.items()
        if name in _EVERY_JOB or is_gpu(name.removeprefix("requests."))
    }


def _scoped(quota: Object) -> bool:
    """Whether it counts only some pods."""
    spec = quota.get("spec") or {}
    return bool(spec.get("scopes") or spec.get("scopeSelector"))


def _must_be_stated(quota: Object, limits: tuple[Object, ...] | Unread) -> Iterator[str]:
    """Requests and limits that a quota makes mandatory and no LimitRange fills in."""
    if _scoped(quota):
        return
    filled = {
        f"{kind}.{name}"
        for item in _items(() if isinstance(limits, Unread) else limits)
        if item.get("type") == "Container"
        for kind, field in (("limits", "default"), ("requests", "defaultRequest"), ("requests", "default"))
        for name in item.get(field) or {}
    }
    for name in (quota.get("spec") or {}).get("hard") or {}:
        whole = f"requests.{name}" if name in _COMPUTE else name
        kind, _, resource = whole.partition(".")
        if kind in ("requests", "limits") and resource in _COMPUTE and whole not in filled:
            yield whole


def _items(ranges: tuple[Object, ...]) -> Iterator[Object]:
    for found in ranges:
        yield from (found.get("spec") or {}).get("limits") or ()
