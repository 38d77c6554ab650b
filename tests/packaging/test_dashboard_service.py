"""The dashboard as a Service of the chart: what it may do, who reaches it, and that its pods are its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.packaging.chart import OF_THE_API_SERVER, OF_THE_OPERATOR, ROOT, VERSIONS, Manifest, of_kind, rendered
from tests.support import kubernetes_schemas
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.follow.doctor.operator import OPERATOR_LABEL, is_operator
from ddpjob_operator.page.server import is_own_host
from ddpjob_operator.page.volumes import Volumes

NAME = "ddpjob-operator-dashboard"
ON: Manifest = {"dashboard": {"enabled": True}}
PROXY = {"namespaceSelector": {"matchLabels": {"team": "auth"}}}


def own(kind: str, values: Manifest = ON) -> Manifest:
    (found,) = [item for item in of_kind(kind, rendered(values)) if item["metadata"]["name"] == NAME]
    return found


def container(values: Manifest = ON) -> Manifest:
    found: Manifest = own("Deployment", values)["spec"]["template"]["spec"]["containers"][0]
    return found


def test_it_is_off_by_default() -> None:
    assert not [item for item in rendered({}) if item["metadata"]["name"] == NAME]


def test_every_object_is_valid() -> None:
    objects = [item for item in rendered(ON) if item["metadata"]["name"] == NAME]
    assert len(objects) == 6
    for item in objects:
        kubernetes_schemas.validate(item, VERSIONS[-1], strict=True)


def test_it_finds_the_api_server_where_the_operator_does() -> None:
    """It gets nothing else from extraEnv: a program that serves pages must not have the operator's Secrets."""
    assert container(ON | {"extraEnv": [*OF_THE_OPERATOR, *OF_THE_API_SERVER]})["env"] == OF_THE_API_SERVER
    assert "env" not in container(ON | {"extraEnv": OF_THE_OPERATOR})


@pytest.mark.parametrize(("namespaces", "kind"), [([], "ClusterRole"), (["default"], "Role")])
def test_its_account_can_only_read(namespaces: list[str], kind: str) -> None:
    values = ON | {"watch": {"namespaces": namespaces}}
    role, binding = own(kind, values), own(f"{kind}Binding", values)
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} <= {"get", "list", "watch"}
    resources = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert resources == {"ddpjobs", "pods", "pods/log", "events"}
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (kind, NAME)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "ddpjob-system"}]
    assert own("Deployment", values)["spec"]["template"]["spec"]["serviceAccountName"] == NAME
    assert role["metadata"].get("namespace") == (namespaces[0] if namespaces else None)
    shown = "--namespace=default" if namespaces else "--all-namespaces"
    assert shown in container(values)["args"]


def test_nobody_reaches_it_until_a_peer_is_named() -> None:
    policy = own("NetworkPolicy")["spec"]
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress"], [])
    named = own("NetworkPolicy", {"dashboard": {"enabled": True, "allowFrom": [PROXY]}})["spec"]
    assert named["ingress"] == [{"ports": [{"port": "pages", "protocol": "TCP"}], "from": [PROXY]}]


def test_isolated_it_connects_to_what_the_operator_does_but_for_the_pods_of_jobs() -> None:
    """It reads their progress by way of the API server."""
    more = {"ports": [{"port": 3128, "protocol": "TCP"}]}
    values = ON | {"operatorNetworkPolicy": {"mode": "isolated", "extraEgress": [more]}}
    kubernetes_schemas.validate(own("NetworkPolicy", values), VERSIONS[-1], strict=True)
    policy = own("NetworkPolicy", values)["spec"]
    policies = {item["metadata"]["name"]: item["spec"] for item in of_kind("NetworkPolicy", rendered(values))}
    of_operator = policies["ddpjob-operator"]["egress"]
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress", "Egress"], [])
    assert more in policy["egress"]
    to_jobs = [rule for rule in of_operator if rule not in policy["egress"]]
    assert [rule["ports"] for rule in to_jobs] == [[{"port": STATUS_PORT, "protocol": "TCP"}]]
    assert all(rule in of_operator for rule in policy["egress"])


def test_its_pods_are_none_of_the_operators() -> None:
    labels = own("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert own("Service")["spec"]["selector"].items() <= labels.items()
    assert own("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    others = [item for item in of_kind("Service", rendered(ON)) if item["metadata"]["name"] != NAME]
    assert others
    assert not any(item["spec"]["selector"].items() <= labels.items() for item in others)


def test_doctor_and_version_take_it_for_no_operator() -> None:
    name, _, value = OPERATOR_LABEL.partition("=")
    found = of_kind("Deployment", rendered(ON | {"shards": 2}))
    assert {item["metadata"]["labels"][name] for item in found} == {value}, "by which they look for operators"
    operators = {item["metadata"]["name"] for item in found if is_operator(item)}
    assert operators == {"ddpjob-operator-shard-0", "ddpjob-operator-shard-1"}


def test_it_is_confined_like_the_operator_and_probed_by_a_request_it_answers() -> None:
    found = container()
    assert found["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert own("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    assert found["livenessProbe"]["httpGet"] == {"path": "/static/icon.svg", "port": "pages"}
    assert is_own_host("10.0.0.7:8265", frozenset()), "a kubelet's Host header"


def test_the_program_takes_its_arguments_and_the_names_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpjob_operator.page import __main__ as program

    link = "Grafana=https://grafana.example.com/?var-ddpjob={name}"
    values = {"dashboard": {"enabled": True, "hosts": ["jobs.example.com"], "links": [link]}}
    given: list[object] = []

    async def take(arguments: object, links: object, volumes: object) -> None:
        given.extend([arguments, links, volumes])

    monkeypatch.setattr(program, "_serve", take)
    assert program.main(container(values)["args"]) == 0
    arguments, links, volumes = given
    assert volumes is None
    assert (arguments.address, arguments.port, arguments.all_namespaces) == ("*", 8265, True)  # type: ignore[attr-defined]
    names = frozenset(arguments.host)  # type: ignore[attr-defined]
    for host in (NAME, f"{NAME}.ddpjob-system.svc", f"{NAME}.ddpjob-system.svc.cluster.local:80", "jobs.example.com"):
        assert is_own_host(host, names), host
    assert not is_own_host("evil.example", names)
    assert [template.title for template in links] == ["Grafana"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shared", "claim"),
    [
        ({}, ("ddpjob-system", "data")),
        ({"volumeOf": "team/checkpoints"}, ("team", "checkpoints")),
        ({"volumeOf": "*"}, None),
    ],
)
def test_a_volume_of_jobs_is_mounted_read_only_and_the_program_knows_whose_it_is(
    shared: Manifest, claim: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddpjob_operator.page import __main__ as program

    values: Manifest = {"dashboard": {"enabled": True, "shared": {"claimName": "data"} | shared}}
    deployment = own("Deployment", values)
    kubernetes_schemas.validate(deployment, VERSIONS[-1], strict=True)
    (volume,) = deployment["spec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "data", "readOnly": True}
    (mount,) = container(values)["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/mnt/shared", "readOnly": True}
    given: list[object] = []

    async def take(arguments: object, links: object, volumes: object) -> None:
        given.append(volumes)

    monkeypatch.setattr(program, "_serve", take)
    here = [argument.replace("/mnt/shared", str(tmp_path)) for argument in container(values)["args"]]
    assert program.main(here) == 0
    assert given == [Volumes(tmp_path.resolve(), claim)]
    assert "volumes" not in own("Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shared", "/none"], "--shared, --volume-of: give both"),
        (["--volume-of", "*"], "--shared, --volume-of: give both"),
        (["--shared", "/none", "--volume-of", "*"], "--shared /none: no such folder"),
        (["--shared", "/", "--volume-of", "data"], "--volume-of data: give NAMESPACE/CLAIM"),
    ],
)
def test_what_the_program_cannot_show_is_refused_with_a_word(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ddpjob_operator.page import __main__ as program

    with pytest.raises(SystemExit):
        program.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"dashboard": {"enabled": True}, "watch": {"namespaces": ["a", "b"]}},
        {"dashboard": {"enabled": True, "links": ["a=javascript:alert(1)"]}},
        {"dashboard": {"enabled": True, "surprise": 1}},
        {"dashboard": {"enabled": True, "shared": {"volumeOf": "team/data"}}},
        {"dashboard": {"enabled": True, "shared": {"claimName": "data", "volumeOf": "data"}}},
        {"dashboard": {"enabled": True, "shared": {"claimName": "../data"}}},
    ],
)
def test_what_cannot_work_is_refused(values: Manifest) -> None:
    with pytest.raises(Exception, match="dashboard"):
        rendered(values)


def test_the_program_needs_no_package_that_the_image_lacks() -> None:
    lock = (ROOT / "requirements" / "operator.txt").read_text()
    assert {"jinja2", "markupsafe", "aiohttp", "kubernetes"} <= set(re.findall(r"(?m)^([a-z0-9-]+)==", lock))
    hidden = "import sys; sys.modules.update(dict.fromkeys(('rich', 'typer', 'pathspec')))"
    subprocess.run(
        [sys.executable, "-c", f"{hidden}; import ddpjob_operator.page.__main__"], check=True, timeout=PATIENCE_SECONDS
    )
