"""The NetworkPolicy of the operator's own pods: who reaches which port, and what the operator reaches."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest
from tests.packaging.chart import CHART, VERSIONS, Manifest, everything, of_kind, rendered
from tests.support import kubernetes_schemas

from ddpjob_operator.core.manifests.network_policy import DNS_PORTS
from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.core.values.job import CLUSTER_DNS
from ddpjob_operator.core.values.names import job_labels

NODES = {"ipBlock": {"cidr": "10.0.0.0/16"}}
PROMETHEUS = {"podSelector": {"matchLabels": {"app": "prometheus"}}}


def policy(**values: Any) -> Manifest | None:
    """What it says with these values of `operatorNetworkPolicy`."""
    return next(
        (
            found["spec"]
            for found in of_kind("NetworkPolicy", rendered({"operatorNetworkPolicy": values}))
            if found["metadata"]["name"] == "ddpjob-operator"
        ),
        None,
    )


def ingress(values: Manifest) -> dict[str, list[Manifest] | None]:
    """By the port that a rule is about, from where; None is from everywhere."""
    (found,) = of_kind("NetworkPolicy", rendered(values))
    return {port["port"]: rule.get("from") for rule in found["spec"]["ingress"] for port in rule["ports"]}


def test_it_is_about_the_operators_pods_and_names_their_ports() -> None:
    (found,), (deployment,) = (of_kind(kind, rendered({})) for kind in ("NetworkPolicy", "Deployment"))
    assert found["spec"]["podSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert set(ingress({})) == {port["name"] for port in container["ports"]}


def test_by_default_kubelets_reach_the_probes_and_the_namespace_of_prometheus_the_metrics() -> None:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert ingress({}) == {"probes": None, "http": [monitoring]}


def test_both_can_be_opened_to_other_peers() -> None:
    peers = {"probesFrom": [NODES], "metricsFrom": [PROMETHEUS]}
    found = ingress({"operatorNetworkPolicy": peers})
    assert found.keys() == {"probes", "http"}
    assert (found["probes"] or [])[0] == NODES
    assert found["http"] == [PROMETHEUS]


def test_where_only_nodes_reach_the_probes_the_pod_of_helm_test_does_too() -> None:
    """It asks /readyz on the same port, and is no kubelet."""
    values = {"operatorNetworkPolicy": {"probesFrom": [NODES]}}
    (pod,) = of_kind("Pod", everything(values))
    nodes, tester = ingress(values)["probes"] or []
    assert (nodes, list(tester)) == (NODES, ["podSelector"])
    selected = tester["podSelector"]["matchLabels"]
    assert selected
    assert pod["metadata"]["labels"].items() >= selected.items()
    operator = of_kind("Deployment", rendered(values))[0]["spec"]["template"]["metadata"]["labels"]
    assert not operator.items() >= selected.items()


def test_without_scrapers_nobody_reaches_the_metrics() -> None:
    """An empty list of peers would let everybody in."""
    values = {"networkPolicy": {"scrapers": {"kubernetes.io/metadata.name": None}}}
    assert ingress(values) == {"probes": None}


def test_egress_is_open_unless_the_operator_is_isolated() -> None:
    found = policy()
    assert found is not None
    assert (found["policyTypes"], "egress" in found) == (["Ingress"], False)


def test_an_isolated_operator_reaches_the_api_server_dns_and_its_jobs() -> None:
    proxy = {"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}
    found = policy(mode="isolated", apiServer={"cidrs": ["10.96.0.1/32", "203.0.113.5/32"]}, extraEgress=[proxy])
    assert found is not None
    assert found["policyTypes"] == ["Ingress", "Egress"]
    api, dns, jobs, extra = found["egress"]
    assert [port["port"] for port in api["ports"]] == [443, 6443]
    assert [peer["ipBlock"]["cidr"] for peer in api["to"]] == ["10.96.0.1/32", "203.0.113.5/32"]
    (server,) = dns["to"]
    assert server["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": CLUSTER_DNS.namespace}
    assert server["podSelector"]["matchLabels"] == dict(CLUSTER_DNS.labels), "the DNS servers that jobs reach"
    ports = {(port["port"], port["protocol"]) for port in dns["ports"]}
    assert ports == {(port, protocol) for port in DNS_PORTS for protocol in ("UDP", "TCP")}
    assert [port["port"] for port in jobs["ports"]] == [STATUS_PORT]
    (pods,) = jobs["to"]
    assert pods["podSelector"]["matchLabels"].items() <= job_labels("digits", "uid").items()
    assert extra == proxy


def test_it_can_be_left_out() -> None:
    assert policy(mode="off") is None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"probesFrom": [NODES], "metricsFrom": [PROMETHEUS], "dns": []},
        {"mode": "isolated"},
        {"mode": "isolated", "apiServer": {"cidrs": ["10.96.0.1/32"], "ports": [443]}, "dns": []},
    ],
)
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_it_is_valid_on(version: str, values: Manifest) -> None:
    for found in of_kind("NetworkPolicy", everything({"operatorNetworkPolicy": values})):
        kubernetes_schemas.validate(found, version, strict=True)


@pytest.mark.parametrize("values", [{"mode": "open"}, {"apiServer": {"cidrs": ["10.96.0.1"]}}, {"metricsFrom": "all"}])
def test_a_wrong_value_is_refused(values: Manifest) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match="operatorNetworkPolicy"):
        chart.validate_schema({"operatorNetworkPolicy": values})
