"""What the values of the chart change, and which are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from tests.packaging.chart import (
    ALL_OPTIONS,
    CHART,
    Manifest,
    documents,
    everything,
    of_kind,
    operator_of,
    rendered,
    settings_of,
)

from ddp_trainer.launch.status.metric_table import TABLE as OF_TRAINERS
from ddpjob_operator.metric_table import TABLE as OF_THE_OPERATOR
from ddpjob_operator.settings import Settings
from ddpjob_operator.tenancy import read


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicaCount": "two"}, "replicaCount"),
        ({"replicaCount": 9}, "replicaCount"),
        ({"shards": 0}, "shards"),
        ({"shards": 33}, "shards"),
        ({"settings": {"SHARD": "1"}}, "SHARD"),
        ({"replicas": 2}, "replicas"),
        ({"fullnameOverride": "Jobs"}, "fullnameOverride"),
        ({"fullnameOverride": "1-jobs"}, "fullnameOverride"),
        ({"nameOverride": "jobs.v1"}, "nameOverride"),
        ({"crd": {"install": False}}, "crd"),
        ({"global": {"imageRegistry": "https://registry.example"}}, "imageRegistry"),
        ({"extraEnv": {"A": "b"}}, "extraEnv"),
        ({"extraEnv": [{"name": "A", "value": 1}]}, "extraEnv/0/value"),
        ({"extraVolumeMounts": [{"name": "ca"}]}, "mountPath"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable"),
        ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologyKey"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"watch": {"namespaces": ["Team_A"]}}, "namespaces"),
        ({"podMonitor": {"interval": "often"}}, "interval"),
        ({"podMonitor": {"limits": {"bodySizeLimit": "8 megabytes"}}}, "bodySizeLimit"),
        ({"settings": {"NAMESPACES": "a"}}, "NAMESPACES"),
        ({"settings": {"POLL_SECOND": "5"}}, "POLL_SECOND"),
        ({"settings": {"WORKERS": 4}}, "WORKERS"),
        ({"networkPolicy": {"mode": "on"}}, "mode"),
        ({"tenancy": {"bounds": {"maxNodes": 0}}}, "maxNodes"),
        ({"tenancy": {"namespaces": {"students": {"bound": {}}}}}, "bound"),
        ({"settings": {"SCRAPERS": "a=b"}}, "SCRAPERS"),
        ({"replica": 1}, "replica"),
        ({"admissionPolicies": {"enabled": "auto"}}, "enabled"),
        ({"metrics": {"readers": [{"name": "prometheus"}]}}, "namespace"),
        ({"dashboards": {"prices": {"namespaces": {"research": {"gpuHour": -1}}}}}, "gpuHour"),
        ({"dashboards": {"prices": {"namespaces": {"research": {"nodeHour": "3"}}}}}, "nodeHour"),
        ({"dashboards": {"prices": {"namespaces": {"research": {"gpu": 3}}}}}, "gpu"),
        ({"dashboards": {"prices": {"namespaces": {'a"}) or (': {"gpuHour": 3}}}}}, "propertyName"),
        ({"dashboards": {"prices": {"research": {"gpuHour": 3}}}}, "research"),
        ({"serviceMonitor": {"tokenSecret": {"name": "token"}}}, "key"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: Manifest, named: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=named):
        chart.validate_schema(values)


def test_a_chart_that_depends_on_this_one_may_switch_it_on_and_off(tmp_path: Path) -> None:
    """Helm hands a condition such as `ddpjob-operator.enabled` to the chart that it switches, as a value."""
    dependency = {"name": CHART.name, "version": "0.1.0", "condition": f"{CHART.name}.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    shutil.copytree(CHART, tmp_path / "charts" / CHART.name)
    with helm.Chart.load(tmp_path) as chart:
        texts = {
            enabled: "".join(chart.render({CHART.name: {"enabled": enabled}}, name="platform", namespace="ml").values())
            for enabled in (True, False)
        }
    assert ["kind: Deployment" in text for text in texts.values()] == [True, False]


OF_OTHER_VALUES = {
    "NAMESPACES", "TRAINER_IMAGE", "NETWORK_POLICY", "SCRAPERS", "CONFIG", "PORT", "PROBE_PORT",
    "METRICS_AUTHENTICATION", "METRICS_CERTIFICATE", "SHARDS", "SHARD", "LEASE_NAME", "LEASE_NAMESPACE", "IDENTITY",
}  # fmt: skip
"""Settings that the chart writes from values of their own, and those that must be unlike any other pod's."""


def test_settings_of_the_chart_are_those_that_the_operator_knows() -> None:
    """It ends on any other one: a release with a misspelt name was installed, and its pods never ran."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]
    known = {field.name.upper() for field in fields(Settings)}
    assert known > OF_OTHER_VALUES
    assert sorted(schema["propertyNames"]["enum"]) == sorted(known - OF_OTHER_VALUES)


@pytest.mark.parametrize("name", ["123", "1e3", "0x1f"])
def test_labels_are_text_whatever_the_release_is_called(name: str) -> None:
    """An ApplicationSet of Argo CD may name them by the numbers of pull requests."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(ALL_OPTIONS, name=name, namespace="ddpjob-system")
    manifests = [item for file, text in texts.items() if not file.endswith("NOTES.txt") for item in documents(text)]
    assert {item["metadata"]["labels"]["app.kubernetes.io/instance"] for item in manifests} == {name}
    selector = of_kind("Deployment", manifests)[0]["spec"]["selector"]["matchLabels"]
    assert selector["app.kubernetes.io/instance"] == name


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("ml.v1", "ml-v1-ddpjob-operator"),
        ("ddpjob-operator.v1", "ddpjob-operator-v1"),
        ("1234", "r-1234-ddpjob-operator"),
        ("9" * 53, "r-" + "9" * 51),
        ("jobs", "jobs-ddpjob-operator"),
        ("x" * 53, "x" * 53),
    ],
)
def test_whatever_helm_takes_for_a_release_is_a_name_for_a_service(release: str, name: str) -> None:
    """Helm takes dots, and a digit in front. The API server refused the Service after other objects were made."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render({"dashboard": {"enabled": True}}, name=release, namespace="ddpjob-system")
    manifests = [item for file, text in texts.items() if not file.endswith("NOTES.txt") for item in documents(text)]
    services = {service["metadata"]["name"] for service in of_kind("Service", manifests)}
    assert services == {name, f"{name}-dashboard"}
    assert [service for service in services if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service)] == []
    (tester,) = of_kind("Pod", manifests)
    variable = f"{name.upper().replace('-', '_')}_SERVICE_HOST"
    assert f"$({variable})" in tester["spec"]["containers"][0]["args"][1], "as the kubelet names it"


def test_global_pull_secrets_may_be_names_as_other_charts_of_a_parent_want_them() -> None:
    values = {"global": {"imagePullSecrets": ["mirror", {"name": "other"}]}, "imagePullSecrets": [{"name": "mirror"}]}
    pod = of_kind("Deployment", rendered(values))[0]["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "mirror"}, {"name": "other"}]


ALL_PARTS: Manifest = {
    "replicaCount": 2,
    "metrics": {"authentication": True, "tls": {"secretName": "tls"}},
    **{
        part: {"enabled": True}
        for part in ("serviceMonitor", "podMonitor", "dashboard", "dashboards", "prometheusRules")
    },
}


def places(values: Manifest, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from places(value, (*above, name))


def with_value(values: Manifest, place: tuple[str, ...], value: Any) -> Manifest:
    name, *rest = place
    inner = with_value(values.get(name, {}), tuple(rest), value) if rest else value
    return values | {name: inner}


def test_a_namespace_may_have_a_number_for_a_name() -> None:
    """As one of a pull request or a year has. The API server takes no number for a name."""
    metrics = {"authentication": True, "readers": [{"name": "2026", "namespace": "2025"}]}
    values = ALL_PARTS | {"watch": {"namespaces": ["2024"]}, "metrics": metrics}
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="ddpjob-operator", namespace="1234")
    manifests = [item for file, text in texts.items() if not file.endswith("NOTES.txt") for item in documents(text)]
    assert {item["metadata"].get("namespace", "") for item in manifests} == {"", "1234", "2024"}
    subjects = [subject for item in manifests for subject in item.get("subjects", ())]
    assert {subject["namespace"] for subject in subjects} == {"1234", "2025"}
    assert "2026" in {subject["name"] for subject in subjects}


def test_a_value_that_is_left_empty_is_none_or_is_refused_by_name() -> None:
    """`podLabels:` in a file of values, with nothing behind it, is a null: it takes the chart's own value away."""
    refused = {}
    with helm.Chart.load(CHART) as chart:
        for place in places(yaml.safe_load((CHART / "values.yaml").read_text())):
            empty = with_value(ALL_PARTS, place, None)
            try:
                texts = chart.render(empty, name="ddpjob-operator", namespace="ddpjob-system").values()
            except helm.HelmValuesError as error:
                refused[".".join(place)] = str(error)
            else:
                assert not [text for text in texts if "<nil>" in text], place
    assert all(f"missing property '{name.rpartition('.')[2]}'" in said for name, said in refused.items())
    # left out, these would open the network, or delete every job
    assert refused.keys() >= {"networkPolicy.mode", "operatorNetworkPolicy.apiServer.ports", "crds.keep"}
    assert not refused.keys() & {
        "tenancy",
        "podLabels",
        "imagePullSecrets",
        "watch.namespaces",
        "image.tag",
        "resources",
    }


def test_jobs_are_closed_to_the_network_unless_that_is_switched_off() -> None:
    assert settings_of({})["NETWORK_POLICY"] == "ingress"
    assert settings_of({})["SCRAPERS"] == "kubernetes.io/metadata.name=monitoring"
    # a value is merged into the chart's own, so the default label is taken away by a null
    off = {"networkPolicy": {"mode": "off", "scrapers": {"kubernetes.io/metadata.name": None, "a": "b", "c": "d"}}}
    assert (settings_of(off)["NETWORK_POLICY"], settings_of(off)["SCRAPERS"]) == ("off", "a=b,c=d")


def test_each_shard_has_a_deployment_that_selects_its_own_pods() -> None:
    manifests = rendered({"shards": 3, "replicaCount": 2})
    deployments = of_kind("Deployment", manifests)
    assert [item["metadata"]["name"] for item in deployments] == [f"ddpjob-operator-shard-{i}" for i in range(3)]
    environments = [
        {entry["name"]: entry.get("value") for entry in item["spec"]["template"]["spec"]["containers"][0]["env"]}
        for item in deployments
    ]
    given = [[found[f"DDPJOB_OPERATOR_{name}"] for name in ("SHARD", "SHARDS", "LEASE_NAME")] for found in environments]
    assert given == [[str(number), "3", "ddpjob-operator"] for number in range(3)]
    selectors = [item["spec"]["selector"]["matchLabels"] for item in deployments]
    budgets = [item["spec"]["selector"]["matchLabels"] for item in of_kind("PodDisruptionBudget", manifests)]
    spreads = [item["spec"]["template"]["spec"]["topologySpreadConstraints"][0] for item in deployments]
    assert budgets == selectors == [spread["labelSelector"]["matchLabels"] for spread in spreads]
    for number, item in enumerate(deployments):
        labels = item["spec"]["template"]["metadata"]["labels"].items()
        assert [selector.items() <= labels for selector in selectors] == [place == number for place in range(3)]
    service = of_kind("Service", manifests)[0]["spec"]["selector"].items()
    assert all(service <= item["spec"]["template"]["metadata"]["labels"].items() for item in deployments)


def test_one_shard_is_an_operator_as_ever() -> None:
    """The selector of a Deployment cannot be changed, so an upgrade must not bring another one."""
    (deployment,) = of_kind("Deployment", rendered({}))
    assert deployment["metadata"]["name"] == "ddpjob-operator"
    assert set(deployment["spec"]["selector"]["matchLabels"]) == {
        "app.kubernetes.io/name", "app.kubernetes.io/instance"
    }  # fmt: skip


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


def test_monitors_are_off_by_default_and_need_no_honor_labels() -> None:
    assert not [m for m in rendered({}) if m["kind"].endswith("Monitor")]
    manifests = rendered({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}})
    pods = of_kind("PodMonitor", manifests)[0]["spec"]["podMetricsEndpoints"][0]
    operator = of_kind("ServiceMonitor", manifests)[0]["spec"]["endpoints"][0]
    assert "honorLabels" not in pods | operator, "with it, a pod could write series of any namespace"
    assert operator["relabelings"] == [{"action": "labeldrop", "regex": "namespace"}]


@pytest.mark.parametrize(
    ("namespaces", "selected"), [([], {"any": True}), (["team-a", "team-b"], {"matchNames": ["team-a", "team-b"]})]
)
def test_prometheus_looks_for_trainers_where_the_operator_has_jobs(namespaces: list[str], selected: Manifest) -> None:
    (monitor,) = of_kind("PodMonitor", rendered({"podMonitor": {"enabled": True}, "watch": {"namespaces": namespaces}}))
    assert monitor["spec"]["namespaceSelector"] == selected


LIMITS = ("sampleLimit", "labelLimit", "labelNameLengthLimit", "labelValueLengthLimit")


def test_a_pod_cannot_fill_prometheus() -> None:
    (limited,) = of_kind("PodMonitor", rendered({"podMonitor": {"enabled": True}}))
    assert all(limited["spec"][name] > 0 for name in LIMITS)
    assert "bodySizeLimit" not in limited["spec"]
    (sized,) = of_kind("PodMonitor", rendered({"podMonitor": {"enabled": True, "limits": {"bodySizeLimit": "8MB"}}}))
    assert sized["spec"]["bodySizeLimit"] == "8MB"
    unlimited = {"podMonitor": {"enabled": True, "limits": dict.fromkeys(LIMITS)}}
    assert not set(LIMITS) & of_kind("PodMonitor", rendered(unlimited))[0]["spec"].keys()


def test_a_pod_writes_no_series_of_the_operator_nor_of_another_exporter() -> None:
    """Alerts add some of them up over all namespaces, or take the namespace from a label of the series."""
    (monitor,) = of_kind("PodMonitor", rendered({"podMonitor": {"enabled": True}}))
    kept, _ = monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert (kept["action"], kept["sourceLabels"]) == ("keep", ["__name__"])
    assert [name for name in OF_TRAINERS if not re.fullmatch(kept["regex"], name)] == []
    others = (*OF_THE_OPERATOR, "DCGM_FI_DEV_GPU_UTIL", "kubelet_volume_stats_available_bytes", "up")
    assert [name for name in others if re.fullmatch(kept["regex"], name)] == []


def test_a_pod_does_not_choose_the_job_that_its_series_are_of() -> None:
    """An alert joins by pod: with two jobs of one pod, Prometheus fails to evaluate it for all others as well."""
    (monitor,) = of_kind("PodMonitor", rendered({"podMonitor": {"enabled": True}}))
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    assert endpoint["relabelings"] == [
        {"action": "keep", "sourceLabels": ["__meta_kubernetes_pod_controller_kind"], "regex": "DDPJob"},
        {"action": "replace", "sourceLabels": ["__meta_kubernetes_pod_controller_name"], "targetLabel": "ddpjob"},
    ]
    assert endpoint["metricRelabelings"][-1] == {"action": "labeldrop", "regex": "(exported_)+ddpjob"}


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
