"""The pod of `ddpjob debug`: like the failed one, but no pod of the gang, without its program and its GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_job
from tests.support import kubernetes_schemas

from ddpjob_operator.cluster.owners import key_of_pod, owner_of
from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.debug_pod import Visit, build_debug_pod
from ddpjob_operator.core.manifests.network_policy import build_policies
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pod_security import pod_security_violations
from ddpjob_operator.core.manifests.pods import build_pod, rendezvous_selector
from ddpjob_operator.core.values.job import Defaults, Manifest, NetworkAccess, PodSecurity
from ddpjob_operator.core.values.observed import ServiceView

GPUS = {"limits": {"nvidia.com/gpu": 8, "cpu": "96", "memory": "1Ti"}, "requests": {"cpu": "90"}}
SECRET = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
TEMPLATE = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "serviceAccountName": "trainer",
    "schedulerName": "volcano",
    "priorityClassName": "high",
    "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            }
        },
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []},
    },
}


def trainer_pod(**spec: Any) -> tuple[Admitted, Manifest]:
    given = {"env": [SECRET], "resources": GPUS, "restart": {"scope": "InPlace"}, "podTemplate": {"spec": TEMPLATE}}
    admitted = admit(make_job(**(given | spec)), Defaults())
    assert isinstance(admitted, Admitted)
    pod = build_pod(admitted, Place(2, 1, ServiceView(host="10.0.0.1", attempt=2)))
    # what the API server adds
    pod["spec"]["volumes"].append({"name": "kube-api-access-x7k2p", "projected": {"sources": []}})
    mount = {"name": "kube-api-access-x7k2p", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    pod["spec"]["containers"][0]["volumeMounts"].append(mount)
    pod["spec"]["nodeName"] = "worker-3"
    return admitted, pod


def debug_pod(node: str | None = "worker-3", gpus: bool = False, **spec: Any) -> Manifest:
    admitted, failed = trainer_pod(**spec)
    return build_debug_pod(admitted.job, failed, Visit(1800, node, gpus))


@pytest.mark.parametrize("version", ["1.25", kubernetes_schemas.latest_version()])
def test_it_is_a_pod_of_the_restricted_profile_that_ends_by_itself(version: str) -> None:
    made = debug_pod()
    kubernetes_schemas.validate(made, version, strict=True)
    assert list(pod_security_violations(made, PodSecurity.RESTRICTED)) == []
    assert made["spec"]["activeDeadlineSeconds"] == 1800
    assert made["spec"]["restartPolicy"] == "Never"
    assert made["spec"]["containers"][0]["command"] == ["sleep", "1800"]
    assert "args" not in made["spec"]["containers"][0]


def test_it_has_the_failed_pod_s_image_environment_and_volumes() -> None:
    _, failed = trainer_pod()
    theirs, ours = failed["spec"]["containers"][0], debug_pod()["spec"]["containers"][0]
    for field in ("name", "image", "env", "securityContext"):
        assert ours[field] == theirs[field], field
    assert SECRET in ours["env"]
    assert ours["volumeMounts"] == theirs["volumeMounts"][:-1]
    assert debug_pod()["spec"]["volumes"] == failed["spec"]["volumes"][:-1]
    assert debug_pod()["spec"]["securityContext"] == failed["spec"]["securityContext"]
    assert debug_pod()["spec"]["serviceAccountName"] == "trainer"


def test_a_webhook_that_has_injected_volumes_may_do_so_again() -> None:
    """Linkerd's appends its own to every pod, and the API server refuses two of one name."""
    mine = {"name": "data", "emptyDir": {}}
    admitted, failed = trainer_pod(podTemplate={"spec": TEMPLATE | {"volumes": [mine]}})
    spec = failed["spec"]
    made = build_debug_pod(admitted.job, failed, Visit(1800, None))["spec"]
    spec["volumes"] += [{"name": "linkerd-identity-end-entity", "emptyDir": {"medium": "Memory"}}]
    spec["containers"][0]["volumeMounts"].append({"name": "vault-secrets", "mountPath": "/vault/secrets"})
    assert build_debug_pod(admitted.job, failed, Visit(1800, None))["spec"] == made
    assert mine in made["volumes"]


def test_neither_operator_nor_service_nor_network_policy_takes_it_for_a_pod_of_the_gang() -> None:
    admitted, _ = trainer_pod()
    metadata = debug_pod()["metadata"]
    assert owner_of(debug_pod()) is None
    assert key_of_pod(debug_pod()).name == ""
    assert metadata["labels"] == {"training.ddpjob.io/role": "debug"}
    assert "finalizers" not in metadata
    selectors = [rendezvous_selector(admitted.job, 2)]
    closed = Admitted(admitted.job, Defaults(network=NetworkAccess("ddpjob-system")))
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in build_policies(closed)]
    assert len(selectors) == 2
    assert not any(selector.items() <= metadata["labels"].items() for selector in selectors)
    assert [(owner["kind"], owner["name"]) for owner in metadata["ownerReferences"]] == [("DDPJob", "digits")]


def test_it_runs_on_the_node_of_the_failure_also_if_that_is_cordoned() -> None:
    spec = debug_pod()["spec"]
    field = {"key": "metadata.name", "operator": "In", "values": ["worker-3"]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    assert spec["affinity"] == {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    assert {"key": "gpu", "operator": "Exists"} in spec["tolerations"]
    assert "node.kubernetes.io/unschedulable" in [item["key"] for item in spec["tolerations"]]
    assert "nodeName" not in spec  # which would pass the scheduler by, and with it the room that is left


def test_on_any_node_it_is_placed_as_its_job_may_be() -> None:
    spec = debug_pod(node=None)["spec"]
    assert spec["affinity"] == {"nodeAffinity": TEMPLATE["affinity"]["nodeAffinity"]}
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert "node.kubernetes.io/unschedulable" not in [item["key"] for item in spec["tolerations"]]


def test_it_neither_competes_with_the_gang_nor_waits_for_its_devices() -> None:
    made = debug_pod()["spec"]
    assert made["containers"][0]["resources"] == {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "96", "memory": "1Ti"},
    }
    assert not made.keys() & {"schedulerName", "priorityClassName", "initContainers", "topologySpreadConstraints"}
    small = debug_pod(resources={"limits": {"cpu": "50m", "memory": "128Mi"}})["spec"]["containers"][0]["resources"]
    assert small["requests"] == {"cpu": "50m", "memory": "128Mi"}
    none = debug_pod(resources=None)["spec"]["containers"][0]["resources"]
    assert none == {"requests": {"cpu": "100m", "memory": "256Mi"}}


def test_it_reserves_no_part_of_the_disk_that_it_is_limited_to() -> None:
    limits = {"memory": "1Ti", "ephemeral-storage": "500Gi"}
    resources = debug_pod(resources={"limits": limits})["spec"]["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "0"}
    assert resources["limits"] == limits
    kept = debug_pod(gpus=True, resources={"limits": limits})["spec"]["containers"][0]["resources"]
    assert kept == {"limits": limits}


def test_with_gpus_it_has_all_that_the_failed_pod_had() -> None:
    _, failed = trainer_pod()
    resources = debug_pod(gpus=True)["spec"]["containers"][0]["resources"]
    assert resources == failed["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize("gpus", [False, True])
def test_it_joins_the_networks_of_the_ranks_where_it_has_their_devices(gpus: bool) -> None:
    annotations = {"k8s.v1.cni.cncf.io/networks": "ib", "team": "a"}
    made = debug_pod(gpus=gpus, podTemplate={"metadata": {"annotations": annotations}})
    assert made["metadata"]["annotations"] == (annotations if gpus else {"team": "a"})


def test_it_fits_beside_pods_that_keep_apart_by_a_label_of_their_own() -> None:
    term = {"labelSelector": {"matchLabels": {"app": "digits"}}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    metadata = {"labels": {"app": "digits", "team": "a"}}
    labels = debug_pod(podTemplate={"metadata": metadata, "spec": {"affinity": apart}})["metadata"]["labels"]
    assert (labels.get("app"), labels["team"]) == (None, "a")
