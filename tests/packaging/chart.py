"""What `helm install` and `kubectl apply -k` would apply, as objects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

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
    return list(documents(_built(folder)))


@cache
def _built(folder: str) -> str:
    kubectl = Path(sys.executable).parent / "kubectl"
    command = [kubectl, "kustomize", ROOT / "manifests" / folder]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Loader(yaml.CSafeLoader):
    """YAML in which a key that appears twice is an error, as it is for the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice in {keys}"
        return super().construct_mapping(node, deep)


def documents(text: str) -> Iterator[Manifest]:
    yield from filter(None, yaml.load_all(text, Loader))


def of_kind(kind: str, manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def operator_of(values: Manifest) -> Manifest:
    """The operator's container."""
    container: Manifest = of_kind("Deployment", rendered(values))[0]["spec"]["template"]["spec"]["containers"][0]
    return container


def settings_of(values: Manifest) -> dict[str, str]:
    return {item["name"].removeprefix("DDPJOB_OPERATOR_"): item["value"] for item in operator_of(values)["env"]}


OF_THE_API_SERVER: list[Manifest] = [
    {"name": "KUBERNETES_SERVICE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    {"name": "KUBERNETES_SERVICE_PORT", "value": "7445"},
]
"""Variables of extraEnv that say where the API server is."""

OF_THE_OPERATOR: list[Manifest] = [
    {"name": "DDPJOB_OPERATOR_NOTIFY_TOKEN", "valueFrom": {"secretKeyRef": {"name": "receiver", "key": "token"}}},
    {"name": "DDPJOB_OPERATOR_SHARD", "value": "1"},
    {"name": "EMPTY"},
]
"""Others, which are for the operator alone."""

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
