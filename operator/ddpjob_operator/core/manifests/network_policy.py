"""Who may reach a job's pods over the network: each other, and those that read their metrics.

torch.distributed neither encrypts nor authenticates: access to a rank's ports is enough to run code in it. So a job
gets a NetworkPolicy of its own, made before its pods, which lets in the pods of the same job on any port, and on the
status port alone the operator, which asks for progress, and the namespaces that metrics are scraped from.

What pods may reach themselves is left to the cluster, unless jobs are isolated: then it is each other and DNS.

A policy does not cover pods on their node's network (`placement.hostNetwork`); such a job gets none rather than one
that says what is not so.
"""

from __future__ import annotations

from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.core.values.job import Manifest, NetworkAccess
from ddpjob_operator.core.values.names import LABEL_NODE_RANK, LABEL_UID, job_labels, policy_name

OPERATOR_LABELS = {"app.kubernetes.io/name": "ddpjob-operator"}
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""On every namespace since Kubernetes 1.21 (KEP-2161); on an older one an administrator has to set it."""

DNS_PORT = 53


def build_policy(admitted: Admitted) -> Manifest | None:
    """The NetworkPolicy of a job, or None where it is to have none."""
    job = admitted.job
    access, template = admitted.defaults.network, job.spec.pod_template
    of_the_node = template is not None and bool((template.spec or {}).get("hostNetwork"))
    if access is None or of_the_node or job.spec.placement.host_network:
        return None
    gang = {
        "matchLabels": {LABEL_UID: job.uid},
        # the pod that fetches data serves nothing, and has to reach what it fetches from
        "matchExpressions": [{"key": LABEL_NODE_RANK, "operator": "Exists"}],
    }
    peers = [{"podSelector": gang}]
    status_port = {"port": STATUS_PORT, "protocol": "TCP"}
    spec: Manifest = {
        "podSelector": gang,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers}, {"from": _readers(access), "ports": [status_port]}],
    }
    if access.isolated:
        names = [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": peers}, {"ports": names}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": policy_name(job.name),
            "namespace": job.namespace,
            "labels": job_labels(job.name, job.uid),
            "ownerReferences": [admitted.owner_reference()],
        },
        "spec": spec,
    }


def _readers(access: NetworkAccess) -> list[Manifest]:
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: access.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    scrapers = {"namespaceSelector": {"matchLabels": dict(access.scrapers)}}
    return [operator, scrapers] if access.scrapers else [operator]
