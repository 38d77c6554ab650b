"""Whether a NetworkPolicy cuts the pods of a job off from each other, and whether admission webhooks answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpjob_operator.core.values.names import DOMAIN, LABEL_MANAGED_BY, LABEL_UID, MANAGED_BY
from ddpjob_operator.follow.doctor.facts import Facts, Hook, Unread
from ddpjob_operator.follow.doctor.findings import Finding, ok, problem, unknown, warning
from ddpjob_operator.follow.doctor.nodes import named
from ddpjob_operator.follow.doctor.operator import environment, serves
from ddpjob_operator.wire.objects import Object

OF_A_POD = {LABEL_MANAGED_BY: MANAGED_BY} | {
    f"{DOMAIN}/{name}": "any" for name in ("job", "uid", "attempt", "node-rank")
}
"""Labels of a pod of a job that does not exist yet, without those of its podTemplate."""
_SENT = (("", "pods"), ("", "services"), ("", "persistentvolumeclaims"), (DOMAIN, "ddpjobs"))
"""Group and resource of what is created for every job."""
_MESH = ("istio-injection", "istio.io/rev", "istio.io/dataplane-mode", "kuma.io/sidecar-injection")
_OUT = (None, "disabled", "none", "false", "no")
"""Values with which such a label takes nothing in."""
_LINKERD = "linkerd.io/inject"
_ALL_NETWORKS = ("0.0.0.0/0", "::/0")


def mesh(facts: Facts) -> Finding:
    """Whether a service mesh takes in what runs in the namespace: its proxy stands between the ranks."""
    if isinstance(facts.space, Unread):
        return unknown("mesh", facts.space)
    metadata = (facts.space or {}).get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    signs = [f"{key}={labels[key]}" for key in _MESH if labels.get(key) not in _OUT]
    if labels.get("istio-injection") == "disabled":  # which comes before a revision
        signs = [sign for sign in signs if not sign.startswith("istio.io/rev=")]
    if (value := annotations.get(_LINKERD)) in ("enabled", "ingress"):
        signs.append(f"{_LINKERD}={value}")
    if not signs:
        return ok("mesh", f"nothing says that namespace {facts.namespace} is part of a service mesh")
    return warning(
        "mesh",
        f"namespace {facts.namespace} is part of a service mesh ({', '.join(signs)}), whose proxies stand between the "
        "ranks of a job, and between them and the operator",
        'keep jobs out of it by podTemplate.metadata: labels sidecar.istio.io/inject: "false" and '
        "istio.io/dataplane-mode: none, the label kuma.io/sidecar-injection: disabled, or the annotation "
        "linkerd.io/inject: disabled",
    )


def network(facts: Facts) -> Finding:
    """Whether the NetworkPolicies of the namespace let the pods of a job reach each other on any port.

    What several allow is added up; the operator's own policy lets a job's pods in to each other, but not out.
    """
    if isinstance(facts.policies, Unread):
        return unknown("network", facts.policies)
    foreign = [item["spec"] for item in facts.policies if LABEL_UID not in (item["metadata"].get("labels") or {})]
    ours = [spec for spec in foreign if matches(spec.get("podSelector") or {}, OF_A_POD)]
    out = [spec for spec in ours if "Egress" in _types(spec)]
    labels = facts.space_labels
    fix = f"add a policy that allows all traffic among pods with the label {LABEL_MANAGED_BY}={MANAGED_BY}"
    if out and not any(_lets(spec.get("egress"), "to", labels) for spec in out):
        return problem("network", f"{_names(facts, out)} keeps pods of a job from each other (egress)", fix)
    into = [spec for spec in ours if "Ingress" in _types(spec)]
    if into and not any(_lets(spec.get("ingress"), "from", labels) for spec in into):
        mode = _mode(facts)
        if mode == "off":
            return problem("network", f"{_names(facts, into)} keeps pods of a job from each other (ingress)", fix)
        if mode is None:
            said = f"{_names(facts, into)} keeps pods from each other unless the operator makes policies of its own"
            return warning("network", said, "set networkPolicy.mode: ingress in its chart, or " + fix)
    return ok("network", "no NetworkPolicy keeps pods of a job from each other" if foreign else "no NetworkPolicy")


def webhooks(facts: Facts) -> Finding:
    """Whether admission webhooks without which nothing is created have endpoints that are ready."""
    if isinstance(facts.hooks, Unread):
        return unknown("webhooks", facts.hooks)
    asked = relevant(facts.hooks, facts.space_labels)
    dead = [hook for hook in asked if hook.service is not None and facts.endpoints.get(hook.service) == 0]
    if dead:
        services = named(dict.fromkeys("/".join(hook.service) for hook in dead if hook.service is not None))
        return problem(
            "webhooks",
            f"{named(hook.name for hook in dead)} fails closed, and the Service {services} has no ready endpoint",
            "start its pods, or ask an administrator to remove its webhook configuration",
        )
    for hook in asked:
        found = facts.endpoints.get(hook.service) if hook.service is not None else None
        if isinstance(found, Unread):
            return unknown("webhooks", found)
    return ok(
        "webhooks",
        f"{len(asked)} fail closed for what a job creates, and answer" if asked else "none sees what a job creates",
    )


def relevant(hooks: Iterable[Hook], labels: Mapping[str, str] | None) -> list[Hook]:
    """Those that see what is created for a job in a namespace with these labels; None: not known."""
    return [
        hook
        for hook in hooks
        if (labels is None or matches(hook.namespace_selector, labels))
        and matches(hook.object_selector, OF_A_POD)
        and any(_is_sent(rule) for rule in hook.rules)
    ]


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector matches; an empty one matches everything."""
    exact = (selector.get("matchLabels") or {}).items()
    return all(labels.get(name) == value for name, value in exact) and all(
        _meets(requirement, labels) for requirement in selector.get("matchExpressions") or ()
    )


def _meets(requirement: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(requirement["key"]), requirement.get("values") or ()
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False


def _is_sent(rule: Object) -> bool:
    operations, groups, resources = (rule.get(name) or () for name in ("operations", "apiGroups", "resources"))
    created = "CREATE" in operations or "*" in operations
    return created and any(
        (group in groups or "*" in groups) and ({resource, "*", "*/*"} & set(resources)) for group, resource in _SENT
    )


def _types(spec: Object) -> Iterable[str]:
    """The API server fills in what is not given."""
    return spec.get("policyTypes") or ("Ingress", *(("Egress",) if spec.get("egress") else ()))


def _lets(rules: Any, peers: str, labels: Mapping[str, str] | None) -> bool:
    """Whether one of the rules allows every port of the pods of a job."""
    return any(
        not rule.get("ports") and (not rule.get(peers) or any(_is_pod(peer, labels) for peer in rule[peers]))
        for rule in rules or ()
    )


def _is_pod(peer: Object, labels: Mapping[str, str] | None) -> bool:
    if "ipBlock" in peer:
        return peer["ipBlock"].get("cidr") in _ALL_NETWORKS and not peer["ipBlock"].get("except")
    space = peer.get("namespaceSelector")
    here = space is None or labels is None or matches(space, labels)
    return here and matches(peer.get("podSelector") or {}, OF_A_POD)


def _names(facts: Facts, specs: Iterable[Object]) -> str:
    wanted = [id(spec) for spec in specs]
    found = () if isinstance(facts.policies, Unread) else facts.policies
    names = [item["metadata"]["name"] for item in found if id(item["spec"]) in wanted]
    return f"the NetworkPolicy {named(names)}"


def _mode(facts: Facts) -> str | None:
    """Which policies the operator of the namespace makes; None if its Deployment is not seen."""
    if isinstance(facts.deployments, Unread):
        return None
    serving = next((item for item in facts.deployments if serves(item, facts.namespace)), None)
    return None if serving is None else environment(serving).get("DDPJOB_OPERATOR_NETWORK_POLICY") or "off"
