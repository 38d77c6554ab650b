"""Notifications of the end of jobs: the receiver comes from a Secret, and an isolated operator reaches it."""

from __future__ import annotations

import helm_python as helm
import pytest
from tests.packaging.chart import CHART, VERSIONS, Manifest, of_kind, operator_of, rendered
from tests.support import kubernetes_schemas

WITH: Manifest = {"notifications": {"secretName": "job-ends"}}
ISOLATED: Manifest = {"operatorNetworkPolicy": {"mode": "isolated"}}
PREFIX = "DDPJOB_OPERATOR_NOTIFY_"


def references(values: Manifest) -> dict[str, Manifest]:
    found = {item["name"]: item["valueFrom"] for item in operator_of(values)["env"] if PREFIX in item["name"]}
    return {name.removeprefix(PREFIX): each["secretKeyRef"] for name, each in found.items()}


def receivers(values: Manifest) -> list[Manifest]:
    """What an isolated operator reaches with these values, and not without."""
    policy, without = (
        next(m for m in of_kind("NetworkPolicy", rendered(each)) if m["metadata"]["name"] == "ddpjob-operator")
        for each in (ISOLATED | values, ISOLATED)
    )
    kubernetes_schemas.validate(policy, VERSIONS[-1], strict=True)
    return [rule for rule in policy["spec"]["egress"] if rule not in without["spec"]["egress"]]


def test_url_and_token_come_from_the_secret_and_the_token_may_be_missing() -> None:
    assert references(WITH) == {
        "URL": {"name": "job-ends", "key": "url"},
        "TOKEN": {"name": "job-ends", "key": "token", "optional": True},
    }
    (deployment,) = of_kind("Deployment", rendered(WITH))
    kubernetes_schemas.validate(deployment, VERSIONS[-1], strict=True)


def test_an_isolated_operator_reaches_the_receiver() -> None:
    assert receivers(WITH) == [{"ports": [{"port": 443, "protocol": "TCP"}]}]
    inside = {"to": [{"podSelector": {"matchLabels": {"app": "receiver"}}}], "ports": [{"port": 8080}]}
    assert receivers({"notifications": {"secretName": "job-ends", "egress": [inside]}}) == [inside]


def test_without_a_secret_nothing_is_notified_and_nothing_opened() -> None:
    assert references({}) == {}
    assert receivers({"notifications": {"egress": [{"ports": [{"port": 8443}]}]}}) == []


@pytest.mark.parametrize("values", [{"url": "https://hooks.example/1"}, {"secretName": ["a"]}, {"egress": "all"}])
def test_a_wrong_value_is_refused(values: Manifest) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match="notifications"):
        chart.validate_schema({"notifications": values})
