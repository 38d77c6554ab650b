"""Where pods may run, as a real API server keeps it: `placement` and `resources` beside the podTemplate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator

HOSTNAME = "kubernetes.io/hostname"
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


async def first_pod(cluster: Cluster, **spec: Any) -> dict[str, Any]:
    """What the API server made of the first pod of such a job."""
    template = {"spec": {"schedulerName": "none", "tolerations": [TOLERATION]}}
    await cluster.apply_job(podTemplate=template, **spec)
    pod: dict[str, Any] = (await cluster.gang_exists())[0]
    return pod


def terms(pod: dict[str, Any], kind: str) -> list[tuple[str, dict[str, str]]]:
    """Topology key and labels of each required term."""
    found = (pod["spec"].get("affinity") or {}).get(kind) or {}
    required = found.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    return [(term["topologyKey"], term["labelSelector"]["matchLabels"]) for term in required]


async def test_a_gang_stays_in_one_rack_on_nodes_of_its_own(cluster: Cluster, operator: Operator) -> None:
    rack = "topology.kubernetes.io/rack"
    pod = await first_pod(cluster, placement={"topologyKey": rack, "onePodPerNode": True, "shmSize": "2Gi"})
    job = await cluster.job()
    of_this_attempt = {"training.ddpjob.io/uid": job["metadata"]["uid"], "training.ddpjob.io/attempt": "0"}
    assert terms(pod, "podAffinity") == [(rack, of_this_attempt)]
    assert terms(pod, "podAntiAffinity") == [(HOSTNAME, of_this_attempt)]
    assert TOLERATION in pod["spec"]["tolerations"]
    memory = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
    assert {"medium": "Memory", "sizeLimit": "2Gi"} in memory
    assert "/dev/shm" in [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]


async def test_pods_on_the_network_of_their_node_share_none_and_still_know_the_services(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    (tmp_path / "tenancy.yaml").write_text("bounds: {hostNetwork: true}")
    await start_operator(CONFIG=tmp_path / "tenancy.yaml")
    pod = await first_pod(cluster, placement={"hostNetwork": True})
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert [key for key, _ in terms(pod, "podAntiAffinity")] == [HOSTNAME]


@pytest.mark.parametrize(("asked", "ranks"), [({}, "4"), ({"procsPerNode": 2}, "2")])
async def test_each_gpu_gets_a_rank_unless_the_job_says_otherwise(
    cluster: Cluster, operator: Operator, asked: dict[str, Any], ranks: str
) -> None:
    pod = await first_pod(cluster, resources={"limits": {"nvidia.com/gpu": 4}}, **asked)
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["DDPJOB_PROCS_PER_NODE"] == ranks
