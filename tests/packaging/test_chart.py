"""The chart and the kustomizations: both install the same objects, valid on every
Kubernetes version that has a schema.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.tenancy import read

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ddpjob-operator"
VERSIONS = [f"1.{minor}" for minor in range(25, 38)]

Manifest = dict[str, Any]

INSTALLATIONS: dict[str, Manifest] = {
    "cluster": {},
    "namespaced": {"watch": {"namespaces": ["default"]}},
}


def rendered(values: Manifest) -> list[Manifest]:
    """What `helm install` applies; hooks are left out."""
    return [m for m in everything(values) if "helm.sh/hook" not in m["metadata"].get("annotations", {})]


def everything(values: Manifest) -> list[Manifest]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="ddpjob-operator", namespace="ddpjob-system")
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    return [manifest for text in texts for manifest in documents(text)]


def kustomized(folder: str) -> list[Manifest]:
    kubectl = Path(sys.executable).parent / "kubectl"
    built = subprocess.run(
        [kubectl, "kustomize", ROOT / "manifests" / folder], capture_output=True, text=True, check=True
    )
    return list(documents(built.stdout))


class Loader(yaml.CSafeLoader):
    """YAML in which a key that appears twice is an error, as it is for the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice in {keys}"
        return super().construct_mapping(node, deep)


def documents(text: str) -> Iterator[Manifest]:
    yield from filter(None, yaml.load_all(text, Loader))


def comparable(manifests: list[Manifest]) -> dict[str, Manifest]:
    """By kind, namespace and name, without what only Helm writes.

    The namespace is left out: for a release, --create-namespace makes it.
    """
    found = {}
    for manifest in manifests:
        if manifest["kind"] == "Namespace":
            continue
        metadata = manifest["metadata"]
        labels = {
            name: value
            for name, value in metadata.pop("labels", {}).items()
            if name not in {"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"}
        }
        annotations = {k: v for k, v in metadata.pop("annotations", {}).items() if k != "helm.sh/resource-policy"}
        if manifest["kind"] == "CustomResourceDefinition":
            labels = {}
        found["/".join([manifest["kind"], metadata.get("namespace", ""), metadata["name"]])] = manifest | {
            "metadata": metadata | {"labels": labels, "annotations": annotations}
        }
    return found


def of_kind(kind: str, manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_helm_and_kubectl_apply_install_the_same_objects(overlay: str) -> None:
    """But for the policies, which older API servers do not know: they are manifests of their own."""
    without = INSTALLATIONS[overlay] | {"admissionPolicies": {"enabled": False}}
    assert comparable(rendered(without)) == comparable(kustomized(f"overlays/{overlay}"))


def test_the_policies_are_the_same_with_and_without_helm() -> None:
    policies = [manifest for manifest in rendered({}) if manifest["kind"].startswith("ValidatingAdmission")]
    assert len(policies) == 4
    assert comparable(policies) == comparable(kustomized("policies"))


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


def test_helm_lint_strict_finds_nothing() -> None:
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_every_object_is_valid_on(version: str, overlay: str) -> None:
    for manifest in kustomized(f"overlays/{overlay}"):
        if manifest["kind"] != "CustomResourceDefinition":  # its schema refers to itself; the API server tests apply it
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicaCount": "two"}, "replicaCount"),
        ({"replicaCount": 9}, "replicaCount"),
        ({"replicas": 2}, "replicas"),
        ({"crd": {"install": False}}, "crd"),
        ({"global": {"imageRegistry": "https://registry.example"}}, "imageRegistry"),
        ({"extraEnv": {"A": "b"}}, "extraEnv"),
        ({"extraVolumeMounts": [{"name": "ca"}]}, "mountPath"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable"),
        ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologyKey"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"watch": {"namespaces": ["Team_A"]}}, "namespaces"),
        ({"podMonitor": {"interval": "often"}}, "interval"),
        ({"settings": {"NAMESPACES": "a"}}, "NAMESPACES"),
        ({"settings": {"WORKERS": 4}}, "WORKERS"),
        ({"networkPolicy": {"mode": "on"}}, "mode"),
        ({"tenancy": {"bounds": {"maxNodes": 0}}}, "maxNodes"),
        ({"tenancy": {"namespaces": {"students": {"bound": {}}}}}, "bound"),
        ({"settings": {"SCRAPERS": "a=b"}}, "SCRAPERS"),
        ({"replica": 1}, "replica"),
        ({"admissionPolicies": {"enabled": "auto"}}, "enabled"),
        ({"metrics": {"readers": [{"name": "prometheus"}]}}, "namespace"),
        ({"serviceMonitor": {"tokenSecret": {"name": "token"}}}, "key"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: Manifest, named: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=named):
        chart.validate_schema(values)


def test_the_operators_own_namespace_cannot_be_served() -> None:
    with pytest.raises(helm.HelmError, match="never served"):
        rendered({"watch": {"namespaces": ["team-a", "ddpjob-system"]}})


def test_a_list_of_namespaces_needs_no_right_on_the_whole_cluster() -> None:
    manifests = rendered({"watch": {"namespaces": ["team-a", "team-b"]}})
    assert not [m for m in manifests if m["kind"].startswith("ClusterRole")]
    assert {m["metadata"]["namespace"] for m in of_kind("Role", manifests)} == {"team-a", "team-b", "ddpjob-system"}
    container = of_kind("Deployment", manifests)[0]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "DDPJOB_OPERATOR_NAMESPACES", "value": "team-a,team-b"} in container["env"]


@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_the_operator_has_no_right_on_secrets_exec_or_wildcards(overlay: str) -> None:
    manifests = rendered(INSTALLATIONS[overlay])
    rules = [rule for kind in ("Role", "ClusterRole") for m in of_kind(kind, manifests) for rule in m["rules"]]
    granted = {f"{verb} {resource}" for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
    assert granted
    assert not {grant for grant in granted if "*" in grant or "secrets" in grant or "exec" in grant or "bind" in grant}


def operator_of(values: Manifest) -> Manifest:
    """The operator's container."""
    container: Manifest = of_kind("Deployment", rendered(values))[0]["spec"]["template"]["spec"]["containers"][0]
    return container


def settings_of(values: Manifest) -> dict[str, str]:
    return {item["name"].removeprefix("DDPJOB_OPERATOR_"): item["value"] for item in operator_of(values)["env"]}


def test_jobs_are_closed_to_the_network_unless_that_is_switched_off() -> None:
    assert settings_of({})["NETWORK_POLICY"] == "ingress"
    assert settings_of({})["SCRAPERS"] == "kubernetes.io/metadata.name=monitoring"
    # a value is merged into the chart's own, so the default label is taken away by a null
    off = {"networkPolicy": {"mode": "off", "scrapers": {"kubernetes.io/metadata.name": None, "a": "b", "c": "d"}}}
    assert (settings_of(off)["NETWORK_POLICY"], settings_of(off)["SCRAPERS"]) == ("off", "a=b,c=d")


def test_bounds_reach_the_operator_as_a_file_that_it_understands(tmp_path: Path) -> None:
    granted = {
        "defaults": {"image": "registry.example/trainer:2"},
        "bounds": {"maxNodes": 16, "resources": {"nvidia.com/gpu": 8}},
        "namespaces": {"students": {"bounds": {"maxNodes": 2}}},
    }
    manifests = rendered({"tenancy": granted})
    (file,) = of_kind("ConfigMap", manifests)[0]["data"].values()
    (tmp_path / "tenancy.yaml").write_text(file)
    assert read(tmp_path / "tenancy.yaml").namespaces["students"].bounds.max_nodes == 2
    spec = of_kind("Deployment", manifests)[0]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert settings_of({"tenancy": granted})["CONFIG"] == f"{mounts['tenancy']}/tenancy.yaml"
    assert "CONFIG" not in settings_of({})
    assert not of_kind("ConfigMap", rendered({}))


def test_other_bounds_bring_other_pods() -> None:
    def annotations(most: int) -> Manifest:
        deployment = of_kind("Deployment", rendered({"tenancy": {"bounds": {"maxNodes": most}}}))[0]
        return dict(deployment["spec"]["template"]["metadata"]["annotations"])

    assert annotations(1) == annotations(1) != annotations(2)


def test_the_crd_stays_when_the_release_goes() -> None:
    crd = of_kind("CustomResourceDefinition", rendered({}))[0]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_crd_goes_with_the_release_or_is_left_out_where_a_value_says_so() -> None:
    crd = of_kind("CustomResourceDefinition", rendered({"crds": {"keep": False}}))[0]
    assert "annotations" not in crd["metadata"]
    assert not of_kind("CustomResourceDefinition", rendered({"crds": {"enabled": False}}))


def test_the_chart_carries_the_generated_crd() -> None:
    generated = ROOT / "manifests" / "crd" / "ddpjobs.training.ddpjob.io.yaml"
    assert (CHART / "files" / "crd.yaml").read_bytes() == generated.read_bytes()


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


def test_monitors_are_off_by_default_and_need_no_honor_labels() -> None:
    assert not [m for m in rendered({}) if m["kind"].endswith("Monitor")]
    manifests = rendered({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}})
    pods = of_kind("PodMonitor", manifests)[0]["spec"]["podMetricsEndpoints"][0]
    operator = of_kind("ServiceMonitor", manifests)[0]["spec"]["endpoints"][0]
    assert "honorLabels" not in pods | operator, "with it, a pod could write series of any namespace"
    assert operator["relabelings"] == [{"action": "labeldrop", "regex": "namespace"}]


# those of an API server before 1.30 have none of the policies, which the API server's own tests apply
WITHOUT_A_SCHEMA = frozenset(
    ("CustomResourceDefinition", "PodMonitor", "ServiceMonitor", "ValidatingAdmissionPolicy",
     "ValidatingAdmissionPolicyBinding")
)  # fmt: skip
ALL_OPTIONS: Manifest = {
    "metrics": {"authentication": True, "readers": [{"name": "prometheus", "namespace": "monitoring"}]},
    "fullnameOverride": "ddp",
    "global": {"imageRegistry": "mirror.example:5000/team", "imagePullSecrets": [{"name": "mirror"}]},
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "trainer": {"image": "registry.example/trainer:1"},
    "settings": {"LOG_LEVEL": "DEBUG"},
    "tenancy": {"bounds": {"maxNodes": 4}},
    "operatorNetworkPolicy": {"mode": "isolated"},
    "replicaCount": 3,
    "crds": {"keep": False},
    "serviceAccount": {"annotations": {"team": "ml"}},
    "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": 1},
    "securityContext": {"readOnlyRootFilesystem": False},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs", "readOnly": True}],
    "podDisruptionBudget": {"maxUnavailable": "34%"},
    "commonLabels": {"owner": "platform", "team": "all"},
    "podLabels": {"team": "ml"},
    "podAnnotations": {"team": "ml"},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "system-cluster-critical",
    "serviceMonitor": {"enabled": True, "relabelings": [{"action": "labeldrop", "regex": "pod"}]},
    "podMonitor": {
        "enabled": True,
        "labels": {"team": "ml"},
        "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "ddpjob_rank_.*"}],
    },
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["cluster", "namespaced"])
def test_all_options_at_once_are_valid_on(version: str, namespaces: list[str]) -> None:
    checked = []
    for manifest in everything(ALL_OPTIONS | {"watch": {"namespaces": namespaces}}):
        if manifest["kind"] not in WITHOUT_A_SCHEMA:
            kubernetes_validate.validate(manifest, version, strict=True)
            checked.append(manifest["kind"])
    assert {"Deployment", "PodDisruptionBudget", "Pod", "ConfigMap", "ServiceAccount"} <= set(checked)


def test_all_options_have_the_effect_that_they_name() -> None:
    manifests = rendered(ALL_OPTIONS)
    deployment = of_kind("Deployment", manifests)[0]["spec"]
    template, pod = deployment["template"]["metadata"], deployment["template"]["spec"]
    container = pod["containers"][0]
    assert deployment["replicas"] == 3
    assert container["image"] == "mirror.example:5000/team/ddpjob-operator@sha256:" + "0" * 64
    assert pod["imagePullSecrets"] == [{"name": "mirror"}, {"name": "registry"}]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 1}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["env"][-1] == {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    assert container["volumeMounts"][-1]["name"] == pod["volumes"][-1]["name"] == "ca"
    assert template["labels"].items() >= {"owner": "platform", "team": "ml"}.items()
    assert pod["topologySpreadConstraints"] == [
        ALL_OPTIONS["topologySpreadConstraints"][0] | {"labelSelector": deployment["selector"]}
    ]
    assert of_kind("PodDisruptionBudget", manifests)[0]["spec"]["maxUnavailable"] == "34%"
    for kind, endpoints in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        endpoint = of_kind(kind, manifests)[0]["spec"][endpoints][0]
        asked = ALL_OPTIONS[kind[0].lower() + kind[1:]]
        fields = [field for field in asked if "elabelings" in field]
        assert fields
        for field in fields:
            assert endpoint[field][-len(asked[field]) :] == asked[field], "they come after the chart's own"


def test_common_labels_are_on_every_object_and_never_in_a_selector() -> None:
    manifests = everything(ALL_OPTIONS)
    unlabelled = [m["kind"] for m in manifests if m["metadata"]["labels"].get("owner") != "platform"]
    assert unlabelled == []
    deployment = of_kind("Deployment", manifests)[0]["spec"]
    assert deployment["template"]["metadata"]["labels"].items() >= deployment["selector"]["matchLabels"].items()
    assert "owner" not in deployment["selector"]["matchLabels"]
    assert "owner" not in of_kind("Service", manifests)[0]["spec"]["selector"]


def test_a_label_of_the_user_cannot_hide_the_pods_from_the_service() -> None:
    ours = {"app.kubernetes.io/name": "theirs"}
    manifests = rendered({"commonLabels": ours, "podLabels": ours})
    labels = of_kind("Deployment", manifests)[0]["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= of_kind("Service", manifests)[0]["spec"]["selector"].items()


def test_one_replica_may_be_drained_and_two_are_kept_apart() -> None:
    one, two = rendered({}), rendered({"replicaCount": 2})
    assert not of_kind("PodDisruptionBudget", one)
    assert "topologySpreadConstraints" not in of_kind("Deployment", one)[0]["spec"]["template"]["spec"]
    budget = of_kind("PodDisruptionBudget", two)[0]
    deployment = of_kind("Deployment", two)[0]["spec"]
    (spread,) = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert (budget["apiVersion"], budget["spec"]["maxUnavailable"]) == ("policy/v1", 1)
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert budget["spec"]["selector"] == spread["labelSelector"] == deployment["selector"]
    assert not of_kind("PodDisruptionBudget", rendered({"replicaCount": 2, "podDisruptionBudget": {"enabled": False}}))


@pytest.mark.parametrize(
    ("values", "operator", "trainer"),
    [
        ({}, "localhost/ddpjob-operator:0.1.0", "localhost/ddpjob-trainer:0.1.0-cpu"),
        (
            {"image": {"registry": "r.example", "tag": "1"}},
            "r.example/ddpjob-operator:1",
            "r.example/ddpjob-trainer:0.1.0-cpu",
        ),
        ({"image": {"registry": "", "repository": "a/b"}}, "a/b:0.1.0", "ddpjob-trainer:0.1.0-cpu"),
        (
            {"global": {"imageRegistry": "m.example/"}, "trainer": {"image": "a/b:2"}},
            "m.example/ddpjob-operator:0.1.0",
            "a/b:2",
        ),
    ],
)
def test_images_come_from_the_registry_that_is_named(values: Manifest, operator: str, trainer: str) -> None:
    assert (operator_of(values)["image"], settings_of(values)["TRAINER_IMAGE"]) == (operator, trainer)


def test_roles_in_another_release_name_their_own_lease() -> None:
    (leader,) = [m for m in of_kind("Role", rendered(ALL_OPTIONS)) if m["metadata"]["name"] == "ddp-leader"]
    assert [rule.get("resourceNames") for rule in leader["rules"]] == [None, ["ddp"]]
    assert settings_of(ALL_OPTIONS)["LEASE_NAME"] == "ddp"


def test_the_roles_of_the_manifests_are_written_from_the_rules_of_the_chart() -> None:
    roles = runpy.run_path(str(ROOT / "charts" / "rbac.py"))["ROLES"]
    for role in roles:
        assert (ROOT / "manifests" / role.path).read_text() == role.manifest()


@pytest.mark.parametrize("namespaces", [[], ["team-a", "team-b"]])
def test_uninstalling_leaves_no_pod_with_a_finalizer(namespaces: list[str]) -> None:
    """The Job runs after the operator is gone, with an account of its own, which may patch pods and no more."""
    found = everything({"watch": {"namespaces": namespaces}})
    hooks = [m for m in found if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]
    (job,) = of_kind("Job", hooks)
    (account,) = of_kind("ServiceAccount", hooks)
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["containers"][0]["command"] == ["python", "-m", "ddpjob_operator.cluster.release"]
    assert pod["containers"][0]["env"] == [{"name": "DDPJOB_OPERATOR_NAMESPACES", "value": ",".join(namespaces)}]
    roles = of_kind("Role" if namespaces else "ClusterRole", hooks)
    bindings = of_kind("RoleBinding" if namespaces else "ClusterRoleBinding", hooks)
    assert [role["metadata"].get("namespace") for role in roles] == (namespaces or [None])
    assert [role["rules"] for role in roles] == [[{"apiGroups": [""], "resources": ["pods"],
                                                  "verbs": ["get", "list", "patch"]}]] * len(roles)  # fmt: skip
    assert [one["subjects"][0]["name"] for one in bindings] == [account["metadata"]["name"]] * len(roles)
    weights = [int(m["metadata"]["annotations"].get("helm.sh/hook-weight", 0)) for m in (*roles, *bindings, job)]
    assert weights == sorted(weights)


def test_the_job_after_uninstalling_can_be_left_out() -> None:
    kept = everything({"uninstall": {"releasePods": False}})
    assert not [m for m in kept if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]


class Answer(BaseHTTPRequestHandler):
    """Answers /readyz as the operator does: 503 until it is ready."""

    asked: ClassVar[list[str]] = []
    ready_after: ClassVar[int] = 0

    def do_GET(self) -> None:
        self.asked.append(self.path)
        ready = len(self.asked) > self.ready_after
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"ok" if ready else b"the watches have not begun yet")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("ready_after", "seconds", "code"), [(0, "60", 0), (1, "60", 0), (99, "0", 1)])
def test_helm_test_passes_once_the_operator_is_ready(ready_after: int, seconds: str, code: int) -> None:
    (test,) = [m for m in everything({}) if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
    container = test["spec"]["containers"][0]
    program, url, _ = container["args"]
    service = of_kind("Service", rendered({}))[0]
    (port,) = [item["port"] for item in service["spec"]["ports"] if item["name"] == "probes"]
    assert service["metadata"]["name"] == "ddpjob-operator"
    assert url == f"http://$(DDPJOB_OPERATOR_SERVICE_HOST):{port}/readyz"
    assert test["spec"]["enableServiceLinks"]
    assert container["image"] == operator_of({})["image"]
    assert not test["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    handler = type("Handler", (Answer,), {"asked": [], "ready_after": ready_after})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/readyz"
        done = subprocess.run([sys.executable, "-c", program, here, seconds], capture_output=True, text=True)
        server.shutdown()
    assert (done.returncode, handler.asked) == (code, ["/readyz"] * min(ready_after + 1, 2 - code)), done.stderr


def test_the_readme_of_the_chart_says_what_its_values_are() -> None:
    readme = runpy.run_path(str(ROOT / "charts" / "readme.py"))["readme"]
    assert (CHART / "README.md").read_text() == readme()


@pytest.mark.parametrize("path", sorted((ROOT / "manifests" / "samples").glob("*.yaml")), ids=lambda path: path.name)
def test_a_sample_parses(path: Path) -> None:
    found = list(documents(path.read_text()))
    assert found
    for manifest in found:
        if manifest["kind"] == "DDPJob":
            assert manifest["apiVersion"] == "training.ddpjob.io/v1alpha1"
            DDPJobSpec.model_validate(manifest["spec"])


def test_the_first_sample_is_a_job_of_at_most_ten_lines() -> None:
    lines = (ROOT / "manifests" / "samples" / "ddpjob.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 10
