"""The rights that the chart grants, and its admission policies."""

from __future__ import annotations

import re
import runpy

import helm_python as helm
import pytest
from tests.packaging.chart import (
    ALL_OPTIONS,
    CHART,
    INSTALLATIONS,
    ROOT,
    Manifest,
    documents,
    everything,
    of_kind,
    rendered,
    settings_of,
)

from ddpjob_operator.core.values.names import FINALIZER
from ddpjob_operator.main import leases_of
from ddpjob_operator.settings import Settings


def test_the_policies_are_about_the_namespaces_and_the_account_of_the_release() -> None:
    values = {"watch": {"namespaces": ["a", "b"]}, "serviceAccount": {"create": False, "name": "mine"}}
    bindings = of_kind("ValidatingAdmissionPolicyBinding", rendered(values))
    (bounds,) = (item["spec"] for item in bindings if item["spec"]["policyName"] == "ddpjob-operator-bounds")
    (expression,) = bounds["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert (expression["key"], expression["values"]) == ("kubernetes.io/metadata.name", ["a", "b"])
    assert [item["spec"]["validationActions"] for item in bindings] == [["Deny"], ["Deny"]]
    (condition,) = policy("writes", values)["spec"]["matchConditions"]
    assert condition["expression"] == "request.userInfo.username == 'system:serviceaccount:ddpjob-system:mine'"


def policy(name: str, values: Manifest) -> Manifest:
    policies = of_kind("ValidatingAdmissionPolicy", rendered(values))
    return next(item for item in policies if item["metadata"]["name"] == f"ddpjob-operator-{name}")


def test_the_policy_knows_the_finalizer_that_the_operator_removes_from_a_pod_without_an_owner() -> None:
    rules = policy("writes", {})["spec"]["validations"]
    (owned,) = (item["expression"] for item in rules if "only what a DDPJob owns" in item["message"])
    assert f"'{FINALIZER}' in oldObject.metadata" in owned


def test_the_bounds_of_a_namespace_win_in_the_policy_too() -> None:
    students = {"maxNodes": 2, "resources": {"cpu": 4}, "serviceAccounts": []}
    bounds = {"maxNodes": 16, "resources": {"cpu": 8, "nvidia.com/gpu": "8"}, "serviceAccounts": ["it's"]}
    found = policy("bounds", {"tenancy": {"bounds": bounds, "namespaces": {"students": {"bounds": students}}}})
    variables = {item["name"]: item["expression"] for item in found["spec"]["variables"]}
    assert variables["maxNodes"] == 'dyn({"students":2})[?request.namespace].orValue(dyn(16))'
    assert variables["resources"] == (
        'dyn({"students":{"cpu":"4","nvidia.com/gpu":"8"}})[?request.namespace]'
        '.orValue(dyn({"cpu":"8","nvidia.com/gpu":"8"}))'
    )
    assert variables["serviceAccounts"] == 'dyn({"students":[]})[?request.namespace].orValue(dyn(["it\'s"]))'
    assert variables["level"] == "dyn('baseline')"


def test_the_operators_own_namespace_cannot_be_served() -> None:
    with pytest.raises(helm.HelmError, match="never served"):
        rendered({"watch": {"namespaces": ["team-a", "ddpjob-system"]}})


def test_a_list_of_namespaces_needs_no_right_on_the_whole_cluster() -> None:
    manifests = rendered({"watch": {"namespaces": ["team-a", "team-b"]}})
    assert not [m for m in manifests if m["kind"].startswith("ClusterRole")]
    assert {m["metadata"]["namespace"] for m in of_kind("Role", manifests)} == {"team-a", "team-b", "ddpjob-system"}
    container = of_kind("Deployment", manifests)[0]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "DDPJOB_OPERATOR_NAMESPACES", "value": "team-a,team-b"} in container["env"]


def test_releases_share_nothing_but_the_crd_where_their_names_differ_as_the_page_asks_for() -> None:
    """The name of a namespace is no part of names in the cluster: two releases of one name write the same objects."""

    def of_the_cluster(release: str, namespace: str) -> set[tuple[str, str]]:
        with helm.Chart.load(CHART) as chart:
            texts = chart.render({"watch": {"namespaces": ["team-a"]}}, name=release, namespace=namespace)
        found = [m for file, text in texts.items() if not file.endswith("NOTES.txt") for m in documents(text)]
        return {(m["kind"], m["metadata"]["name"]) for m in found if "namespace" not in m["metadata"]}

    crd = {("CustomResourceDefinition", "ddpjobs.training.ddpjob.io")}
    assert of_the_cluster("one", "a") & of_the_cluster("two", "a") == crd
    shared = of_the_cluster("one", "a") & of_the_cluster("one", "b")
    page = " ".join((ROOT / "docs/operating.md").read_text().split())
    assert (shared == crd) != ("Each needs a name of its own" in page)


def test_the_readme_names_all_that_an_installer_without_rights_on_the_cluster_leaves_out() -> None:
    """An object without a namespace takes such a right, also where the operator has none itself. Of a role, Kubernetes
    asks that who makes it has all its rights.
    """
    readme = " ".join((CHART / "README.md").read_text().split())
    (advice,) = re.findall(r"Without rights on the whole cluster .*? set (.*?) to false", readme)
    parts = re.findall(r"`(\w+)\.(enabled|create)`", advice)
    values: Manifest = {"watch": {"namespaces": ["team-a"]}} | {part: {switch: False} for part, switch in parts}
    found = everything(values)
    assert [m["kind"] for m in found if "namespace" not in m["metadata"]] == []
    assert [m["kind"] for m in found if m["kind"].endswith(("Role", "RoleBinding"))] == []


def test_the_readme_names_the_templates_of_all_roles_that_an_administrator_applies_instead() -> None:
    readme = (CHART / "README.md").read_text()
    files = {f"templates/{name}" for name in re.findall(r"`(dashboard-role\w*\.yaml)`", readme)}
    files |= set(re.findall(r"--show-only (templates/\S+\.yaml)", readme))
    with helm.Chart.load(CHART) as chart:
        values = {"watch": {"namespaces": ["team-a"]}, "dashboard": {"enabled": True}}
        texts = chart.render(values, name="ddpjob-operator", namespace="ddpjob-system")
    roles = {
        file[file.index("templates/") :]
        for file, text in texts.items()
        for m in documents("" if file.endswith("NOTES.txt") else text)
        if m["kind"].endswith(("Role", "RoleBinding")) and "annotations" not in m["metadata"]  # hooks have some
    }
    assert files == roles


@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_the_operator_has_no_right_on_secrets_exec_or_wildcards(overlay: str) -> None:
    manifests = rendered(INSTALLATIONS[overlay])
    rules = [rule for kind in ("Role", "ClusterRole") for m in of_kind(kind, manifests) for rule in m["rules"]]
    granted = {f"{verb} {resource}" for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
    assert granted
    assert not {grant for grant in granted if "*" in grant or "secrets" in grant or "exec" in grant or "bind" in grant}


def test_who_changes_the_owners_of_submitted_code_may_delete_it() -> None:
    """With OwnerReferencesPermissionEnforcement, as on OpenShift, the API server refuses it to others."""
    roles = {m["metadata"]["name"]: m["rules"] for m in of_kind("ClusterRole", rendered({}))}
    (rule,) = (rule for rule in roles["ddpjob-operator-submit"] if rule["resources"] == ["configmaps"])
    assert rule["verbs"] == ["create", "get", "patch", "delete"]


def test_authenticated_metrics_come_with_their_roles_and_with_a_token_for_the_operator_alone() -> None:
    monitors = {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}
    open_to_all = rendered(monitors)
    assert not [m for m in open_to_all if "-metrics-" in m["metadata"]["name"]]
    assert "METRICS_AUTHENTICATION" not in settings_of({})
    closed = {"metrics": {"authentication": True, "readers": [{"name": "p", "namespace": "monitoring"}]}} | monitors
    assert settings_of(closed)["METRICS_AUTHENTICATION"] == "true"
    manifests = rendered(closed)
    rules = {m["metadata"]["name"]: m["rules"] for m in of_kind("ClusterRole", manifests)}
    assert rules["ddpjob-operator-metrics-reader"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    assert [(rule["resources"], rule["verbs"]) for rule in rules["ddpjob-operator-metrics-reviewer"]] == [
        (["tokenreviews"], ["create"]),
        (["subjectaccessreviews"], ["create"]),
    ]
    bound = {m["metadata"]["name"]: m["subjects"][0] for m in of_kind("ClusterRoleBinding", manifests)}
    assert bound["ddpjob-operator-metrics-reader"]["namespace"] == "monitoring"
    assert bound["ddpjob-operator-metrics-reviewer"]["name"] == "ddpjob-operator"
    endpoint = of_kind("ServiceMonitor", manifests)[0]["spec"]["endpoints"][0]
    assert endpoint["bearerTokenFile"].startswith("/var/run/secrets/")
    secret = {"name": "scraper", "key": "token"}
    other = of_kind("ServiceMonitor", rendered(closed | {"serviceMonitor": {"enabled": True, "tokenSecret": secret}}))
    endpoint = other[0]["spec"]["endpoints"][0]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": secret}
    assert "bearerTokenFile" not in endpoint
    pods = of_kind("PodMonitor", manifests)[0]["spec"]["podMetricsEndpoints"][0]
    assert not {"authorization", "bearerTokenFile", "bearerTokenSecret"} & pods.keys(), "a tenant would get the token"


def test_roles_in_another_release_name_their_own_lease() -> None:
    (leader,) = [m for m in of_kind("Role", rendered(ALL_OPTIONS)) if m["metadata"]["name"] == "ddp-leader"]
    assert [rule.get("resourceNames") for rule in leader["rules"]] == [None, ["ddp"]]
    assert settings_of(ALL_OPTIONS)["LEASE_NAME"] == "ddp"


def test_the_leader_of_a_shard_may_renew_the_leases_that_it_holds() -> None:
    (leader,) = [m for m in of_kind("Role", rendered({"shards": 2})) if m["metadata"]["name"].endswith("-leader")]
    held = {
        lease.name
        for shard in (0, 1)
        for lease in leases_of(Settings(shards=2, shard=shard), None)  # type: ignore[arg-type]
    }
    assert {name for rule in leader["rules"] for name in rule.get("resourceNames", ())} == held


def test_the_roles_of_the_manifests_are_written_from_the_rules_of_the_chart() -> None:
    roles = runpy.run_path(str(ROOT / "charts" / "rbac.py"))["ROLES"]
    for role in roles:
        assert (ROOT / "manifests" / role.path).read_text() == role.manifest()
