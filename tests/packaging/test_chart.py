"""The chart and the kustomizations: both install the same objects, valid on every
Kubernetes version that has a schema.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    "namespaced": {"watch": {"namespaces": ["ddpjob-system"]}},
}


def rendered(values: Manifest) -> list[Manifest]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="ddpjob-operator", namespace="ddpjob-system")
    return list(documents("\n---\n".join(text for name, text in files.items() if not name.endswith("NOTES.txt"))))


def kustomized(overlay: str) -> list[Manifest]:
    kubectl = Path(sys.executable).parent / "kubectl"
    built = subprocess.run(
        [kubectl, "kustomize", ROOT / "manifests" / "overlays" / overlay], capture_output=True, text=True, check=True
    )
    return list(documents(built.stdout))


def documents(text: str) -> Iterator[Manifest]:
    yield from filter(None, yaml.safe_load_all(text))


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
    assert comparable(rendered(INSTALLATIONS[overlay])) == comparable(kustomized(overlay))


def test_helm_lint_strict_finds_nothing() -> None:
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_every_object_is_valid_on(version: str, overlay: str) -> None:
    for manifest in kustomized(overlay):
        if manifest["kind"] != "CustomResourceDefinition":  # its schema refers to itself; the API server tests apply it
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": "two"}, "replicas"),
        ({"replicas": 9}, "replicas"),
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
    ],
)
def test_a_wrong_value_is_refused_by_name(values: Manifest, named: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=named):
        chart.validate_schema(values)


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


def settings_of(values: Manifest) -> dict[str, str]:
    container = of_kind("Deployment", rendered(values))[0]["spec"]["template"]["spec"]["containers"][0]
    return {item["name"].removeprefix("DDPJOB_OPERATOR_"): item["value"] for item in container["env"]}


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
    assert not of_kind("CustomResourceDefinition", rendered({"crd": {"install": False}}))


def test_the_chart_carries_the_generated_crd() -> None:
    generated = ROOT / "manifests" / "crd" / "ddpjobs.training.ddpjob.io.yaml"
    assert (CHART / "files" / "crd.yaml").read_bytes() == generated.read_bytes()


def test_monitors_are_off_by_default_and_keep_the_labels_of_the_job() -> None:
    assert not [m for m in rendered({}) if m["kind"].endswith("Monitor")]
    manifests = rendered({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}})
    assert of_kind("PodMonitor", manifests)[0]["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True
    assert of_kind("ServiceMonitor", manifests)[0]["spec"]["endpoints"][0]["honorLabels"] is True


def test_every_option_of_the_chart_can_be_rendered_at_once() -> None:
    manifests = rendered(
        {
            "fullnameOverride": "ddp",
            "image": {"digest": "sha256:" + "0" * 64},
            "imagePullSecrets": [{"name": "registry"}],
            "trainer": {"image": "registry.example/trainer:1"},
            "settings": {"LOG_LEVEL": "DEBUG"},
            "tenancy": {"bounds": {"maxNodes": 4}},
            "serviceAccount": {"annotations": {"team": "ml"}},
            "podLabels": {"team": "ml"},
            "podAnnotations": {"team": "ml"},
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "system", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "system-cluster-critical",
        }
    )
    deployment = of_kind("Deployment", manifests)[0]
    assert kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].endswith("@sha256:" + "0" * 64)


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
