"""The chart as a dependency of another one, under an alias: Helm takes the alias for the chart's name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import helm_python as helm
import pytest
import yaml
from tests.packaging.chart import CHART, Manifest, documents, of_kind


def installed(folder: Path, values: dict[str, Manifest]) -> list[Manifest]:
    """What a parent called platform applies, with this chart once for each alias and its values."""
    dependencies = [{"name": CHART.name, "version": "0.1.0", "alias": alias} for alias in values]
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": dependencies}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(parent))
    shutil.copytree(CHART, folder / "charts" / CHART.name)
    with helm.Chart.load(folder) as chart:
        texts = chart.render(values, name="platform", namespace="ml")
    return [item for file, text in texts.items() if not file.endswith("NOTES.txt") for item in documents(text)]


@pytest.mark.parametrize("alias", ["ddpjobOperator", "ddpjob_operator", "Training"])
def test_a_chart_that_depends_on_this_one_may_give_it_an_alias(tmp_path: Path, alias: str) -> None:
    """One without dashes can be read as `.Values.ALIAS` by the parent."""
    manifests = installed(tmp_path, {alias: {"dashboard": {"enabled": True}}})
    name = f"platform-{alias.lower().replace('_', '-')}"
    assert {service["metadata"]["name"] for service in of_kind("Service", manifests)} == {name, f"{name}-dashboard"}


OPTIONS: Manifest = {
    "dashboard": {"enabled": True},
    "operatorNetworkPolicy": {"mode": "isolated"},
    "replicaCount": 2,
    "serviceMonitor": {"enabled": True},
}


def test_a_parent_with_this_chart_under_two_aliases_keeps_their_pods_apart(tmp_path: Path) -> None:
    """Two PodDisruptionBudgets for one pod refuse each eviction, and Services sent requests to both operators."""
    aliases = ("research", "batch")
    manifests = installed(tmp_path, dict.fromkeys(aliases, OPTIONS))
    found = {alias: [m for m in manifests if f"platform-{alias}" in m["metadata"]["name"]] for alias in aliases}
    for alias, other in (aliases, aliases[::-1]):
        selectors = list(selectors_of(found[alias]))
        assert len(selectors) == 8
        for selector in selectors:
            assert [labels for labels in pods_of(found[alias]) if labels.items() >= selector.items()] != []
            assert [labels for labels in pods_of(found[other]) if labels.items() >= selector.items()] == []
        (monitor,) = of_kind("ServiceMonitor", found[alias])
        scraped = monitor["spec"]["selector"]["matchLabels"].items()
        services = of_kind("Service", manifests)
        of_it = [service for service in services if service["metadata"]["labels"].items() >= scraped]
        assert of_it == of_kind("Service", found[alias])


def test_a_deployment_under_an_alias_has_the_selector_that_it_had(tmp_path: Path) -> None:
    """It cannot be changed, so an upgrade must not bring another one. A Deployment knows its pods by their owners."""
    for deployment in of_kind("Deployment", installed(tmp_path, {"research": OPTIONS})):
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert set(selector) == {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
        assert deployment["spec"]["template"]["metadata"]["labels"].items() >= selector.items()


def selectors_of(manifests: list[Manifest]) -> Iterator[dict[str, str]]:
    """Those by which other objects than Deployments find pods."""
    for item in manifests:
        match item["kind"], item.get("spec"):
            case "Service", {"selector": selector}:
                yield selector
            case "PodDisruptionBudget", {"selector": {"matchLabels": selector}}:
                yield selector
            case "NetworkPolicy", {"podSelector": {"matchLabels": selector}}:
                yield selector
            case "Deployment", {"template": {"spec": {"topologySpreadConstraints": [constraint]}}}:
                yield constraint["labelSelector"]["matchLabels"]


def pods_of(manifests: list[Manifest]) -> Iterator[dict[str, str]]:
    """Labels of all pods."""
    for item in manifests:
        if item["kind"] == "Pod":
            yield item["metadata"]["labels"]
        elif item["kind"] in {"Deployment", "Job"}:
            yield item["spec"]["template"]["metadata"]["labels"]
