"""The chart and the kustomizations: both install the same objects, valid on every
Kubernetes version that has a schema.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import helm_python as helm
import pytest
from tests.packaging.chart import (
    ALL_OPTIONS,
    CHART,
    INSTALLATIONS,
    ROOT,
    VERSIONS,
    Manifest,
    documents,
    everything,
    kustomized,
    of_kind,
    rendered,
)
from tests.support import kubernetes_schemas

from ddpjob_operator.api.spec import DDPJobSpec


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


@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_helm_and_kubectl_apply_install_the_same_objects(overlay: str) -> None:
    """But for the policies, which older API servers do not know: they are manifests of their own."""
    without = INSTALLATIONS[overlay] | {"admissionPolicies": {"enabled": False}}
    assert comparable(rendered(without)) == comparable(kustomized(f"overlays/{overlay}"))


def test_the_policies_are_the_same_with_and_without_helm() -> None:
    policies = [manifest for manifest in rendered({}) if manifest["kind"].startswith("ValidatingAdmission")]
    assert len(policies) == 4
    assert comparable(policies) == comparable(kustomized("policies"))


def test_helm_lint_strict_finds_nothing() -> None:
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", INSTALLATIONS)
def test_every_object_is_valid_on(version: str, overlay: str) -> None:
    for manifest in kustomized(f"overlays/{overlay}"):
        if manifest["kind"] != "CustomResourceDefinition":  # its schema refers to itself; the API server tests apply it
            assert kubernetes_schemas.validate(manifest, version, strict=True) == version


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


# those of an API server before 1.30 have none of the policies, which the API server's own tests apply
WITHOUT_A_SCHEMA = frozenset(
    ("CustomResourceDefinition", "PodMonitor", "ServiceMonitor", "ValidatingAdmissionPolicy",
     "ValidatingAdmissionPolicyBinding")
)  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["cluster", "namespaced"])
def test_all_options_at_once_are_valid_on(version: str, namespaces: list[str]) -> None:
    checked = []
    for manifest in everything(ALL_OPTIONS | {"watch": {"namespaces": namespaces}}):
        if manifest["kind"] not in WITHOUT_A_SCHEMA:
            kubernetes_schemas.validate(manifest, version, strict=True)
            checked.append(manifest["kind"])
    assert {"Deployment", "PodDisruptionBudget", "Pod", "ConfigMap", "ServiceAccount"} <= set(checked)


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
