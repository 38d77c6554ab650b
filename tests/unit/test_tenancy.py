"""The administrator's file: what it grants to which namespace, and what is wrong with it in one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ddpjob_operator import settings
from ddpjob_operator.core.values.job import Bounds, Defaults, NetworkAccess, Peer, PodSecurity
from ddpjob_operator.settings import BadSetting, Settings
from ddpjob_operator.tenancy import load_defaults, read

FILE = """
defaults:
  image: registry.example/trainer:2
  resources: {requests: {cpu: 500m}, limits: {memory: 16Gi}}
bounds:
  maxNodes: 16
  maxProcsPerNode: 8
  hostNetwork: true
  priorityClasses: [low, high]
  resources: {nvidia.com/gpu: 8, memory: 512Gi}
namespaces:
  students:
    defaults: {resources: {limits: {memory: 2Gi}}}
    bounds: {maxNodes: 2, resources: {nvidia.com/gpu: 1}, podSecurity: restricted, priorityClasses: [research-*]}
"""


@pytest.fixture
def granted(tmp_path: Path) -> Callable[[str], Defaults]:
    (tmp_path / "config.yaml").write_text(FILE)
    return load_defaults(Settings(config=str(tmp_path / "config.yaml"), trainer_image="registry.example/trainer:1"))


def test_a_namespace_that_is_not_named_gets_what_all_get(granted: Callable[[str], Defaults]) -> None:
    assert granted("research") == Defaults(
        trainer_image="registry.example/trainer:2",
        resources={"requests": {"cpu": "500m"}, "limits": {"memory": "16Gi"}},
        bounds=Bounds(
            16,
            8,
            {"nvidia.com/gpu": "8", "memory": "512Gi"},
            host_network=True,
            allowed={"priorityClasses": ("low", "high")},
        ),
    )


def test_a_namespace_overrides_single_values(granted: Callable[[str], Defaults]) -> None:
    assert granted("students") == Defaults(
        trainer_image="registry.example/trainer:2",
        resources={"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}},
        bounds=Bounds(
            2,
            8,
            {"nvidia.com/gpu": "1", "memory": "512Gi"},
            PodSecurity.RESTRICTED,
            host_network=True,
            allowed={"priorityClasses": ("research-*",)},
        ),
    )


def test_without_a_file_the_environment_alone_counts() -> None:
    assert load_defaults(Settings(trainer_image="a"))("any") == Defaults(trainer_image="a")


@pytest.mark.parametrize(("text", "isolated"), [("ingress", False), ("isolated", True)])
def test_the_network_is_closed_where_the_operator_is_told_so(text: str, isolated: bool) -> None:
    found = load_defaults(Settings(network_policy=text, scrapers={"team": "metrics"}))("any").network
    assert found == NetworkAccess("default", {"team": "metrics"}, isolated)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("bounds: {maxNodes: many}", "bounds.maxNodes: is 'many', but: "),
        ("bounds: {maxNodes: 0}", "bounds.maxNodes: is 0, but: "),
        ("bounds: {maxNodes: 1.5}", "bounds.maxNodes: is 1.5, but: "),
        ("bounds: {podSecurity: some}", "bounds.podSecurity: is 'some', but: "),
        ("bounds: {hostAccess: All}", "bounds.hostAccess: is replaced by podSecurity"),
        ("bounds: {serviceAccounts: default}", "bounds.serviceAccounts: is 'default', but: "),
        ("bounds: {maxNods: 1}", "bounds.maxNods: is not known here; correct its name or remove it"),
        ("bounds: {resources: {memory: plenty}}", "bounds.resources.memory: is 'plenty', but: "),
        ("namespaces: {a: {bounds: {nodes: 1}}}", "namespaces.a.bounds.nodes: is not known here"),
        ("namespaces: {Students: {bounds: {maxNodes: 1}}}", "namespaces.Students: is not the name of a namespace"),
        ("namespaces: {students.uni: {}}", "namespaces.students.uni: is not the name of a namespace"),
        ("namespaces: [a]", "namespaces: is ['a'], but: "),
        ("defaults: {resources: {limits: {nvidia.com/gpu: 1}}}",
         "defaults.resources.limits[nvidia.com/gpu]: a job asks for its GPUs itself"),
        ("namespaces: {a: {defaults: {resources: {requests: {amd.com/gpu: 1}}}}}",
         "namespaces.a.defaults.resources.requests[amd.com/gpu]: a job asks"),
        ("- a", "the document: is ['a'], but: "),
        ("a: [", "is no YAML: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_that_names_the_place(tmp_path: Path, text: str, reported: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(BadSetting) as refused:
        read(file)
    message = str(refused.value)
    assert message.startswith(f"DDPJOB_OPERATOR_CONFIG {file}: {reported}")
    assert "\n" not in message


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="cannot be read: No such file or directory"):
        read(tmp_path / "missing.yaml")


def test_an_empty_file_grants_everything(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# nothing yet\n")
    assert read(tmp_path / "config.yaml").bounds.max_nodes is None


@pytest.fixture
def in_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("ddpjob-system")
    own = partial(settings.in_cluster_namespace, tmp_path / "namespace")
    monkeypatch.setattr("ddpjob_operator.tenancy.in_cluster_namespace", own)


@pytest.mark.usefixtures("in_cluster")
@pytest.mark.parametrize("namespace", ["kube-system", "kube-public", "kube-node-lease", "ddpjob-system"])
def test_the_namespaces_of_the_cluster_and_of_the_operator_are_never_served(namespace: str) -> None:
    defaults = load_defaults(Settings())(namespace)
    assert not defaults.bounds.served
    with pytest.raises(BadSetting, match=f"names {namespace}, but"):
        load_defaults(Settings(namespaces=("a", namespace)))


def test_outside_a_cluster_no_namespace_is_the_operators_own() -> None:
    assert load_defaults(Settings(namespaces=("default",)))("default").bounds.served


def test_isolated_jobs_reach_the_resolvers_and_sources_that_the_settings_name() -> None:
    given = {
        "DDPJOB_OPERATOR_NETWORK_POLICY": "isolated",
        "DDPJOB_OPERATOR_RESOLVERS": "openshift-dns/dns.operator.openshift.io/daemonset-dns=default, 169.254.20.10/32",
        "DDPJOB_OPERATOR_SOURCES": "192.0.2.0/24",
        "DDPJOB_OPERATOR_READERS": "198.51.100.0/28",
    }
    found = load_defaults(settings.load(given))("any").network
    assert found is not None
    labels = {"dns.operator.openshift.io/daemonset-dns": "default"}
    assert found.resolvers == (Peer("openshift-dns", labels), Peer(network="169.254.20.10/32"))
    assert found.sources == ("192.0.2.0/24",)
    assert found.readers == ("198.51.100.0/28",)
