"""Who may reach a job's pods: the manifest, read as a cluster that enforces it would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, UID, make_job
from looks import admitted
from tests.support import kubernetes_schemas

from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.network_policy import build_policies, isolation_problems
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Bounds, Manifest, NetworkAccess, Peer
from ddpjob_operator.core.values.observed import ServiceView

OPEN = NetworkAccess("ddpjob-system", {"kubernetes.io/metadata.name": "monitoring"})
JOB = make_job()
OPERATOR = ("ddpjob-system", {"app.kubernetes.io/name": "ddpjob-operator"})
NEIGHBOUR = ("research", {"training.ddpjob.io/uid": "another", "training.ddpjob.io/node-rank": "0"})
DNS = {
    "to": [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }
    ],
    "ports": [
        {"port": 53, "protocol": "UDP"},
        {"port": 53, "protocol": "TCP"},
        {"port": 5353, "protocol": "UDP"},  # of the servers' pods on OpenShift
        {"port": 5353, "protocol": "TCP"},
    ],
}
ISOLATED = replace(OPEN, isolated=True)
FETCHING = {"initializers": [{"name": "data", "source": "https://example.com/a", "path": "a"}]}
ANY_PORT = (22, 9400, 29500, 41234)


def policy(access: NetworkAccess = OPEN, **spec: Any) -> Manifest:
    job = make_job(**spec)
    return build_policies(admitted(job, replace(DEFAULTS, network=access)))[0]


def gang_labels() -> dict[str, str]:
    labels: dict[str, str] = build_pod(admitted(JOB), Place(0, 1, ServiceView("10.96.0.7", 0)))["metadata"]["labels"]
    return labels


def selects(selector: Manifest | None, labels: dict[str, str]) -> bool:
    """A label selector (metav1.LabelSelector), as far as these use it; None selects everything."""
    selector = selector or {}
    exist = all(item["operator"] == "Exists" and item["key"] in labels for item in selector.get("matchExpressions", ()))
    return exist and selector.get("matchLabels", {}).items() <= labels.items()


def lets_in(found: Manifest, namespace: str, labels: dict[str, str], port: int) -> bool:
    """Whether a pod with these labels in that namespace may connect to `port` (networking.k8s.io/v1)."""
    for rule in found["spec"]["ingress"]:
        if not any(entry["port"] == port for entry in rule.get("ports", [{"port": port}])):
            continue
        for peer in rule["from"]:
            there = {"kubernetes.io/metadata.name": namespace}
            near = "namespaceSelector" in peer or namespace == found["metadata"]["namespace"]
            if near and selects(peer.get("namespaceSelector"), there) and selects(peer.get("podSelector"), labels):
                return True
    return False


@pytest.mark.parametrize("version", ["1.25", kubernetes_schemas.latest_version()])
@pytest.mark.parametrize("isolated", [False, True])
def test_a_policy_is_valid_for_the_api_server(isolated: bool, version: str) -> None:
    kubernetes_schemas.validate(policy(replace(OPEN, isolated=isolated)), version, strict=True)


def test_it_covers_the_gang_and_spares_and_not_the_pod_that_fetches_data() -> None:
    found = policy()
    assert selects(found["spec"]["podSelector"], gang_labels())
    assert selects(found["spec"]["podSelector"], gang_labels() | {"training.ddpjob.io/node-rank": "none"})
    initializer = {"training.ddpjob.io/uid": UID, "training.ddpjob.io/role": "initializer"}
    assert not selects(found["spec"]["podSelector"], initializer)
    assert not selects(found["spec"]["podSelector"], NEIGHBOUR[1])


@pytest.mark.parametrize("port", ANY_PORT)
def test_pods_of_one_job_reach_each_other_on_every_port(port: int) -> None:
    assert lets_in(policy(), "research", gang_labels(), port)


@pytest.mark.parametrize(
    ("who", "ports"),
    [
        (NEIGHBOUR, ()),
        (("elsewhere", gang_labels()), ()),
        (("research", {}), ()),
        (("ddpjob-system", {"app": "other"}), ()),
        (("elsewhere", OPERATOR[1]), ()),
        (OPERATOR, (9400,)),
        (("monitoring", {"app": "prometheus"}), (9400,)),
    ],
    ids=["another job", "forged labels in another namespace", "any pod beside it", "a neighbour of the operator",
         "somebody who calls himself the operator", "the operator", "the scraper"],
)  # fmt: skip
def test_nobody_else_reaches_more_than_the_status_port(who: tuple[str, dict[str, str]], ports: tuple[int, ...]) -> None:
    assert tuple(port for port in ANY_PORT if lets_in(policy(), *who, port)) == ports


def test_without_scrapers_only_the_operator_reads_the_status() -> None:
    closed = policy(NetworkAccess("ddpjob-system"))
    assert lets_in(closed, *OPERATOR, 9400)
    assert not lets_in(closed, "monitoring", {"app": "prometheus"}, 9400)


def test_networks_that_ask_on_behalf_of_users_read_the_status_and_no_more() -> None:
    """The API server's, for its proxy."""
    rules = policy(NetworkAccess("ddpjob-system", readers=("10.0.0.0/28",)))["spec"]["ingress"]
    from_network = [rule for rule in rules if {"ipBlock": {"cidr": "10.0.0.0/28"}} in rule["from"]]
    assert [rule["ports"] for rule in from_network] == [[{"port": 9400, "protocol": "TCP"}]]


def test_what_pods_reach_themselves_is_left_to_the_cluster() -> None:
    assert policy()["spec"]["policyTypes"] == ["Ingress"]


def test_isolated_pods_reach_each_other_and_names_and_nothing_else() -> None:
    spec = policy(replace(OPEN, isolated=True))["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    peers, names = spec["egress"]
    assert selects(peers["to"][0]["podSelector"], gang_labels())
    assert not selects(peers["to"][0]["podSelector"], NEIGHBOUR[1])
    assert names == DNS


@pytest.mark.parametrize(
    "spec", [{"placement": {"hostNetwork": True}}, {"podTemplate": {"spec": {"hostNetwork": True}}}]
)
def test_a_job_has_no_policy_where_it_would_not_be_true(spec: dict[str, Any]) -> None:
    assert build_policies(admitted(JOB)) == (), "the operator's setting makes none"
    job = make_job(**spec)
    assert build_policies(admitted(job, replace(DEFAULTS, network=OPEN, bounds=Bounds(host_network=True)))) == ()


@pytest.mark.parametrize("said", [False, None])
def test_a_template_that_takes_the_network_of_the_node_back_leaves_the_policy(said: bool | None) -> None:
    job = make_job(placement={"hostNetwork": True}, podTemplate={"spec": {"hostNetwork": said}})
    found = admitted(job, replace(DEFAULTS, network=OPEN))
    assert not build_pod(found, Place(0, 0, ServiceView("10.96.0.7", 0)))["spec"].get("hostNetwork")
    assert build_policies(found) == build_policies(admitted(JOB, replace(DEFAULTS, network=OPEN)))
    assert list(isolation_problems(job, ISOLATED)) == []


def of_initializers(access: NetworkAccess, **spec: Any) -> Manifest:
    given = {"initializers": [{"name": "data", "source": "pvc://claim/a", "path": "a"}]} | spec
    gang, initializers = build_policies(admitted(make_job(**given), replace(DEFAULTS, network=access)))
    assert gang["metadata"]["name"] != initializers["metadata"]["name"]
    kubernetes_schemas.validate(initializers, kubernetes_schemas.latest_version(), strict=True)
    return initializers


@pytest.mark.parametrize("access", [OPEN, ISOLATED], ids=["ingress", "isolated"])
def test_nobody_reaches_the_pod_of_the_initializers(access: NetworkAccess) -> None:
    found = of_initializers(access)
    job = make_job(initializers=[{"name": "data", "source": "pvc://claim/a", "path": "a"}])
    labels = build_initializer(admitted(job), 0)["metadata"]["labels"]
    assert selects(found["spec"]["podSelector"], labels)
    assert not selects(found["spec"]["podSelector"], gang_labels())
    assert "ingress" not in found["spec"]


def test_an_isolated_initializer_reaches_names_and_the_sources_that_are_named() -> None:
    assert of_initializers(ISOLATED)["spec"]["egress"] == [DNS]
    named = replace(ISOLATED, sources=("192.0.2.0/24",))
    assert of_initializers(named, **FETCHING)["spec"]["egress"] == [
        DNS,
        {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
    ]
    assert "egress" not in of_initializers(OPEN)["spec"]


def test_without_resolvers_an_isolated_job_resolves_nothing() -> None:
    assert len(policy(replace(ISOLATED, resolvers=()))["spec"]["egress"]) == 1


def test_a_resolver_may_be_a_network() -> None:
    _, names = policy(replace(ISOLATED, resolvers=(Peer(network="169.254.20.10/32"),)))["spec"]["egress"]
    assert names["to"] == [{"ipBlock": {"cidr": "169.254.20.10/32"}}]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"placement": {"hostNetwork": True}}, "spec.placement.hostNetwork"),
        ({"podTemplate": {"spec": {"hostNetwork": True}}}, "spec.placement.hostNetwork"),
        (FETCHING, "spec.initializers[0].source"),
    ],
)
def test_a_job_that_cannot_be_isolated_is_refused_where_all_are(spec: dict[str, Any], field: str) -> None:
    defaults = replace(DEFAULTS, bounds=Bounds(host_network=True), network=ISOLATED)
    found = admit(make_job(**spec), defaults)
    assert isinstance(found, Refused)
    assert [problem.partition(":")[0] for problem in found.problems] == [field]
    assert list(isolation_problems(make_job(**spec), OPEN)) == []


def test_it_goes_with_its_job() -> None:
    assert [owner["uid"] for owner in policy()["metadata"]["ownerReferences"]] == [UID]
