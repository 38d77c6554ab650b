"""Elastic gangs and lost nodes on a real API server: sizes follow the nodes there are, and `kubectl scale`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.api_server.history import recorded
from tests.api_server.test_follow import ddpjob
from tests.api_server.test_in_place import pods_are
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths

ELASTIC = {"minNodes": 1, "waitSeconds": 1}
PATIENT = ELASTIC | {"waitSeconds": 600}
"""For a gang of several nodes that is to start whole. They come one after the other, and where that takes more than two
seconds, as on a busy machine, the gang starts with the first ones, as it should.
"""


async def saved(cluster: Cluster) -> None:
    """A snapshot was saved after all that has happened: a spare that is ready waits for nothing else to join."""
    after = datetime.now(UTC) + timedelta(seconds=1)
    snapshot = {"step": 1, "time": after.strftime("%Y-%m-%dT%H:%M:%SZ"), "verified": True}
    path = f"{paths.jobs(cluster.namespace)}/digits/status"
    await cluster.client.merge_patch(path, "ddpjobs/status", {"status": {"snapshot": snapshot}})


async def scale(cluster: Cluster, nodes: int) -> None:
    """`kubectl scale`, and what a HorizontalPodAutoscaler does."""
    path = f"{paths.jobs(cluster.namespace)}/digits/scale"
    await cluster.client.merge_patch(path, "ddpjobs/scale", {"spec": {"replicas": nodes}})


async def test_a_gang_starts_with_the_nodes_there_are_and_grows_when_another_comes(
    cluster: Cluster, operator: Operator
) -> None:
    async with recorded(cluster) as history:
        await cluster.apply_job(nodes=2, elastic=ELASTIC)
        await cluster.gang_exists()
        await cluster.runs("digits-0-0")
        await pods_are(cluster, {"digits-1-0": ("1", "0", "1")})
        await cluster.runs("digits-1-0")
        await pods_are(cluster, {"digits-1-0": ("1", "0", "1"), "digits-1-s0": ("1", "none", "1")})
        small = await cluster.phase_is("Running")
        await cluster.runs("digits-1-s0")
        await pods_are(cluster, {"digits-2-0": ("2", "0", "2"), "digits-2-1": ("2", "1", "2")})
        large = await cluster.phase_is("Restarting")
    assert history.broken_rules() == []
    assert (small["nodes"]["total"], small["disruptions"], small.get("restarts", 0)) == (1, 1, 0)
    assert (large["nodes"]["total"], large["disruptions"], large.get("restarts", 0)) == (2, 2, 0)


async def test_in_place_a_gang_grows_around_the_pods_that_it_has(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(nodes=2, elastic=ELASTIC, restart={"scope": "InPlace"})
    first, _ = await cluster.gang_exists()
    await cluster.runs("digits-0-0")
    await pods_are(cluster, {"digits-0-0": ("1", "0", "1"), "digits-1-s0": ("1", "none", "1")})
    await cluster.runs("digits-1-s0")
    pods = await pods_are(cluster, {"digits-0-0": ("2", "0", "2"), "digits-1-s0": ("2", "1", "2")})
    assert pods["digits-0-0"]["metadata"]["uid"] == first["metadata"]["uid"]
    assert (await cluster.phase_is("Running"))["nodes"]["total"] == 2


async def test_kubectl_scale_and_ddpjob_scale_change_the_size_and_show_it(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(nodes=3, elastic=PATIENT)
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=3)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    await scale(cluster, 2)
    await pods_are(cluster, {"digits-1-0": ("1", "0", "2"), "digits-1-1": ("1", "1", "2")})
    shown = await cluster.client.get(f"{paths.jobs(cluster.namespace)}/digits/scale", "ddpjobs/scale")
    assert shown["status"]["replicas"] == shown["spec"]["replicas"] == 2
    selected, _ = await cluster.client.list(
        paths.pods(cluster.namespace), "pods", labelSelector=shown["status"]["selector"]
    )
    assert {pod["metadata"]["name"] for pod in selected} == {"digits-1-0", "digits-1-1"}

    await cluster.runs("digits-1-0", "digits-1-1")
    await cluster.phase_is("Running")
    scaled = await ddpjob(cluster, "scale", "digits", "--nodes", "3", "-n", cluster.namespace)
    assert scaled == (0, "digits resumes with 3 nodes\n", "")
    two = {f"digits-1-{node}": ("1", str(node), "2") for node in range(2)}
    await pods_are(cluster, two | {"digits-1-s0": ("1", "none", "2")})
    await cluster.runs("digits-1-s0")
    await saved(cluster)
    three = {f"digits-2-{node}": ("2", str(node), "3") for node in range(3)}
    await pods_are(cluster, three)
    await cluster.runs(*three)
    large = await cluster.phase_is("Running")
    assert (large["nodes"]["total"], large["disruptions"], large.get("restarts", 0)) == (3, 2, 0)


@pytest.mark.fault(24)
async def test_the_next_attempt_does_not_wait_for_a_silent_node(cluster: Cluster, operator: Operator) -> None:
    status = await lost(cluster, {"nodeLostSeconds": 1})
    assert status["lastFailure"]["reason"] == "NodeLost"
    assert status["lastFailure"]["podName"] == "digits-0-1"
    assert (status.get("restarts", 0), status["disruptions"]) == (0, 1)


async def test_in_place_only_the_pod_on_the_silent_node_is_replaced(cluster: Cluster, operator: Operator) -> None:
    status = await lost(cluster, {"nodeLostSeconds": 1, "scope": "InPlace"})
    assert status["internal"]["keptPods"] == {"digits-0-0": 0}


@pytest.mark.fault(24)
@pytest.mark.parametrize("force", [False, True])
async def test_a_pod_on_a_silent_node_is_removed_by_force_only_where_the_policy_says_so(
    cluster: Cluster, operator: Operator, force: bool
) -> None:
    await cluster.apply_job(restart={"nodeLostSeconds": 1, "forceDeleteLostPods": force})
    await cluster.gang_exists()
    await cluster.runs("digits-0-0", "digits-0-1")
    await cluster.bound("digits-0-1", node="silent")  # a pod that waited there for seconds would be lost at once
    await cluster.phase_is("Running")
    await cluster.falls_silent("digits-0-1")
    await cluster.gang_exists(attempt=1)

    async def removed() -> bool:
        left = {pod["metadata"]["name"]: pod for pod in await cluster.pods()}
        return "digits-0-1" not in left if force else "deletionTimestamp" in left["digits-0-1"]["metadata"]

    await eventually_async(removed, "it is gone, or waits for its kubelet's word")


@pytest.mark.fault(24)
async def test_a_silent_node_is_given_up_although_a_sidecar_of_its_pod_had_ended(
    cluster: Cluster, operator: Operator
) -> None:
    """Such a pod is not ready anyway, so the node's silence changes no condition. Its deletion by the taint does."""
    sidecar = {"name": "helper", "image": "helper"}
    await cluster.apply_job(
        restart={"nodeLostSeconds": 7, "backoff": {"initialSeconds": 0}},
        # its grace is waited for: the node may only be slow to say that the pod has ended
        podTemplate={"spec": {"containers": [sidecar], "terminationGracePeriodSeconds": 2}},
    )
    _, pod = await cluster.gang_exists()
    patience = {item["key"]: item.get("tolerationSeconds") for item in pod["spec"]["tolerations"]}
    assert patience["node.kubernetes.io/unreachable"] == patience["node.kubernetes.io/not-ready"] == 7
    await cluster.runs("digits-0-0", "digits-0-1")
    await cluster.bound("digits-0-1", node="silent")  # a pod that waited there for seconds would be lost at once
    await cluster.phase_is("Running")
    ended = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    states = {"trainer": {"running": {}}, "helper": ended}
    not_ready = [
        {"type": name, "status": "False", "reason": "ContainersNotReady"} for name in ("ContainersReady", "Ready")
    ]
    status = {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True"}, *not_ready],
        "containerStatuses": [
            {"name": name, "image": "x", "imageID": "", "ready": name == "trainer", "restartCount": 0, "state": state}
            for name, state in states.items()
        ],
    }
    await cluster.report("digits-0-1", status)
    tainted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    await cluster.report("digits-0-1", status | {"conditions": [*status["conditions"], tainted]})
    await cluster.client.delete(f"{paths.pods(cluster.namespace)}/digits-0-1", "pods")
    await cluster.gang_exists(attempt=1)
    found = await cluster.status()
    assert (found["lastFailure"]["reason"], found["lastFailure"]["podName"]) == ("NodeLost", "digits-0-1")
    assert (found.get("restarts", 0), found["disruptions"]) == (0, 1)
    pods = {pod["metadata"]["name"]: pod["metadata"] for pod in await cluster.pods()}
    assert "deletionTimestamp" in pods["digits-0-1"], "only its kubelet may say that it has ended"


async def lost(cluster: Cluster, restart: dict[str, Any]) -> dict[str, Any]:
    """The status once the node under node rank 1 was given up."""
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}} | restart)
    await cluster.gang_exists()
    await cluster.runs("digits-0-0", "digits-0-1")
    await cluster.phase_is("Running")
    await cluster.falls_silent("digits-0-1")

    async def given_up() -> dict[str, Any] | None:
        status = await cluster.status()
        return status if status.get("attempt") == 1 else None

    status = await eventually_async(given_up, "the node is given up")

    async def replaced() -> bool:
        return any(pod["metadata"]["name"] == "digits-1-1" for pod in await cluster.pods())

    await eventually_async(replaced, "another pod has the place of the lost one")
    return status
