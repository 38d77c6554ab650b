"""Who may reach a job's pods over the network: each other, and those that read their metrics.

torch.distributed neither encrypts nor authenticates: access to a rank's ports is enough to run code in it. So a job
gets a NetworkPolicy of its own, made before its pods, which lets in the pods of the same job on any port, and on the
status port alone the operator, which asks for progress, and the namespaces that metrics are scraped from. The pod of
its initializers serves nothing, and lets nobody in.

What pods may reach themselves is left to the cluster, unless jobs are isolated: then it is each other and the cluster's
DNS servers. Port 53 elsewhere would be a way out of any isolation. Initializers may then reach the networks that the
administrator names, and a job that cannot be isolated is refused.

A policy does not cover pods on their node's network (`placement.hostNetwork`); such a job gets none rather than one
that says what is not so.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.core.values.job import Job, Manifest, NetworkAccess, Peer
from ddpjob_operator.core.values.names import (
    INITIALIZER,
    LABEL_NODE_RANK,
    LABEL_ROLE,
    LABEL_UID,
    initializer_policy_name,
    job_labels,
    policy_name,
)

OPERATOR_LABELS = {"app.kubernetes.io/name": "ddpjob-operator"}
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""On every namespace since Kubernetes 1.21 (KEP-2161); on an older one an administrator has to set it."""

DNS_PORTS = (53, 5353)
"""Of the servers' pods, which a policy goes by, not of their Service: 5353 on OpenShift."""


def build_policies(admitted: Admitted) -> tuple[Manifest, ...]:
    """The NetworkPolicies of a job: of its gang, and of its initializers where it has any."""
    job, access = admitted.job, admitted.defaults.network
    if access is None or _on_the_nodes_network(job):
        return ()
    policies = [_policy(admitted, policy_name(job.name), _of_gang(job, access))]
    if job.spec.initializers:
        policies.append(_policy(admitted, initializer_policy_name(job.name), _of_initializers(job, access)))
    return tuple(policies)


def isolation_problems(job: Job, access: NetworkAccess | None) -> Iterator[str]:
    """Why a job cannot be isolated where every job has to be."""
    if access is None or not access.isolated:
        return
    if _on_the_nodes_network(job):
        yield (
            "spec.placement.hostNetwork: the jobs of this cluster are isolated, and no NetworkPolicy covers pods on "
            "the network of their node; remove it, in podTemplate too"
        )
    for index, item in enumerate(job.spec.initializers):
        if not access.sources and item.source is not None and not item.source.startswith("pvc://"):
            yield (
                f"spec.initializers[{index}].source: the jobs of this cluster are isolated, and its administrator "
                "names no network to fetch from (DDPJOB_OPERATOR_SOURCES); use pvc://, or ask for it"
            )


def _of_gang(job: Job, access: NetworkAccess) -> Manifest:
    gang = {"matchLabels": {LABEL_UID: job.uid}, "matchExpressions": [{"key": LABEL_NODE_RANK, "operator": "Exists"}]}
    peers = [{"podSelector": gang}]
    status_port = {"port": STATUS_PORT, "protocol": "TCP"}
    spec: Manifest = {
        "podSelector": gang,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers}, {"from": _readers(access), "ports": [status_port]}],
    }
    if access.isolated:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": peers}, *_names(access)]}
    return spec


def _of_initializers(job: Job, access: NetworkAccess) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": {LABEL_UID: job.uid, LABEL_ROLE: INITIALIZER}},
        "policyTypes": ["Ingress"],
    }
    if access.isolated:
        sources = [{"to": [{"ipBlock": {"cidr": network}} for network in access.sources]}] if access.sources else []
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [*_names(access), *sources]}
    return spec


def _policy(admitted: Admitted, name: str, spec: Manifest) -> Manifest:
    job = admitted.job
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": job_labels(job.name, job.uid),
            "ownerReferences": [admitted.owner_reference()],
        },
        "spec": spec,
    }


def _names(access: NetworkAccess) -> list[Manifest]:
    """To resolve names; without resolvers nothing, since a rule without peers is open to all."""
    ports = [{"port": port, "protocol": protocol} for port in DNS_PORTS for protocol in ("UDP", "TCP")]
    return [{"to": [_peer(resolver) for resolver in access.resolvers], "ports": ports}] if access.resolvers else []


def _peer(peer: Peer) -> Manifest:
    if peer.network:
        return {"ipBlock": {"cidr": peer.network}}
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: peer.namespace}},
        "podSelector": {"matchLabels": dict(peer.labels)},
    }


def _on_the_nodes_network(job: Job) -> bool:
    """What the podTemplate says takes precedence, as in the pods."""
    template = job.spec.pod_template
    users = (template.spec if template else None) or {}
    return bool(users.get("hostNetwork", job.spec.placement.host_network))


def _readers(access: NetworkAccess) -> list[Manifest]:
    """The operator, the scrapers, and networks such as the API server's, which asks on behalf of users."""
    readers = [_peer(Peer(access.operator_namespace, OPERATOR_LABELS))]
    if access.scrapers:
        readers.append({"namespaceSelector": {"matchLabels": dict(access.scrapers)}})
    return [*readers, *({"ipBlock": {"cidr": network}} for network in access.readers)]
