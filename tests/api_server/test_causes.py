"""What keeps a gang from starting is in the job's conditions, and `ddpjob why` begins with it: why, of which pod, and
what to do about it.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.api_server.test_follow import ddpjob
from tests.support.waiting import eventually_async

WAITING = {
    "ErrImagePull": "rpc error: not found",
    "InvalidImageName": "couldn't parse image reference",
    "CreateContainerConfigError": 'secret "token" not found',
}
"""What a kubelet says of a container that it cannot start: each a job of its own below."""

UNSCHEDULABLE = {
    "missing-claim": 'persistentvolumeclaim "mine" not found',
    "too-large": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
}
"""What a scheduler says."""

ADVICE = {
    "ErrImagePull": "imagePullSecrets",
    "InvalidImageName": "Correct the image name",
    "CreateContainerConfigError": "Create it in the job's namespace",
    "missing-claim": "spec.shared.claimName",
    "too-large": "add nodes",
}


def job_name(cause: str) -> str:
    return cause.lower()


async def stuck(cluster: Cluster, cause: str, status: dict[str, Any]) -> None:
    """A job of two nodes whose second pod does not get any further."""
    name = job_name(cause)
    await cluster.apply_job(name)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(job=name)]
    await cluster.runs(pods[0])
    await cluster.report(pods[1], {"phase": "Pending"} | status)


def container(reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    placed = {"type": "PodScheduled", "status": "True"}
    trainer = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    return {"conditions": [placed], "containerStatuses": [trainer]}


def unscheduled(message: str) -> dict[str, Any]:
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [reason]}


async def why_begins_with(condition: dict[str, Any], cluster: Cluster, name: str = "digits") -> str:
    """The answer of `ddpjob why`, whose headline says what this condition says."""
    answer = await ddpjob(cluster, "why", name, "-n", cluster.namespace)
    assert answer.code == 0, answer.err
    headline = answer.out.partition("\n")[0]
    assert headline.startswith(f"{name}: Starting for ")
    assert headline.endswith(f": {condition['reason']}: {condition['message'].splitlines()[0]}")
    return answer.out


@pytest.mark.fault(26, 27, 33)
async def test_what_a_pod_waits_for_is_a_condition_of_the_job(cluster: Cluster, operator: Operator) -> None:
    for reason, message in WAITING.items():
        await stuck(cluster, reason, container(reason, message))
    for cause, message in UNSCHEDULABLE.items():
        await stuck(cluster, cause, unscheduled(message))
    for cause, message in (WAITING | UNSCHEDULABLE).items():
        reason, name = cause if cause in WAITING else "Unschedulable", job_name(cause)
        degraded = await cluster.condition("Degraded", reason, name)
        assert degraded["status"] == "True"
        assert f"pod {name}-0-1: {message.rstrip('.')}" in degraded["message"]
        assert ADVICE[cause] in degraded["message"]
        assert (await cluster.status(name))["phase"] == "Starting"
        await why_begins_with(degraded, cluster, name)
    for cause in UNSCHEDULABLE:
        scheduled = await cluster.condition("Scheduled", "Unschedulable", job_name(cause))
        assert scheduled["status"] == "False"
        assert UNSCHEDULABLE[cause].rstrip(".") in scheduled["message"]


async def test_a_volume_that_cannot_be_mounted_is_found_in_the_events_of_its_pod(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(podTemplate={"spec": {"nodeName": "nowhere"}})
    pods = await cluster.gang_exists()
    first, second = (pod["metadata"] for pod in pods)
    await cluster.runs(first["name"])
    said = 'MountVolume.SetUp failed for volume "key" : secret "key" not found'
    await cluster.warn_about(second, "FailedMount", said)
    degraded = await cluster.condition("Degraded", "FailedMount")
    assert f'pod {second["name"]}: MountVolume.SetUp failed for volume "key"' in degraded["message"]
    assert "Create it in the job's namespace" in degraded["message"]
    await why_begins_with(degraded, cluster)
    await cluster.runs(second["name"])
    status = await cluster.phase_is("Running")
    assert {item["type"]: item["status"] for item in status["conditions"]}["Degraded"] == "False"


async def test_trouble_is_written_once_and_taken_back_when_the_gang_runs(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    for nodes in (2, 3, 4):  # the scheduler tries again, and counts again
        words = f"0/{nodes} nodes are available: {nodes} Insufficient cpu."
        await cluster.report(pods[1], {"phase": "Pending"} | unscheduled(words))
        await cluster.condition("Degraded", "Unschedulable")
    before = await cluster.cost()
    assert sum(asked.resource == "ddpjobs/status" for asked in before) == 2, "starting, and why it does not"
    await cluster.runs(*pods)
    status = await cluster.phase_is("Running")
    held = {item["type"]: item["status"] for item in status["conditions"]}
    assert (held["Degraded"], held["Scheduled"], held["Running"]) == ("False", "True", "True")


async def test_what_the_api_server_refuses_is_a_condition_too(cluster: Cluster, operator: Operator) -> None:
    limits = {"type": "Container", "max": {"memory": "1Gi"}, "default": {"memory": "1Gi"}}
    await cluster.client.create(
        f"/api/v1/namespaces/{cluster.namespace}/limitranges",
        "limitranges",
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": [limits]}},
    )
    nobody = {"podTemplate": {"spec": {"serviceAccountName": "nobody"}}}
    await cluster.apply_job("account", **nobody)
    await cluster.apply_job("priority", scheduling={"priorityClassName": "nowhere"})
    await cluster.apply_job("memory", resources={"limits": {"memory": "2Gi"}})
    words = {
        "account": ('serviceaccount "nobody" not found', "podTemplate.spec.serviceAccountName"),
        "priority": ("no PriorityClass with name nowhere", "scheduling.priorityClassName"),
        "memory": ("maximum memory usage per Container is 1Gi", ""),
    }
    for name, (said, advice) in words.items():
        degraded = await cluster.condition("Degraded", "Forbidden", name)
        assert "the API server rejected Pod" in degraded["message"]
        assert said in degraded["message"]
        assert advice in degraded["message"]
        await why_begins_with(degraded, cluster, name)
    assert await cluster.pods() == []


async def test_a_gang_that_a_queue_holds_back_waits_without_being_degraded(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job()
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked by a gate"}
    for pod in pods:
        await cluster.report(pod, {"phase": "Pending", "conditions": [gated]})
    scheduled = await cluster.condition("Scheduled", "SchedulingGated")
    assert scheduled["status"] == "False"
    assert "Wait for the queue." in await why_begins_with(scheduled, cluster)

    async def let_go() -> bool:
        await cluster.runs(*pods)
        return (await cluster.status())["phase"] == "Running"

    await eventually_async(let_go, "it runs")
    types = {item["type"]: item["status"] for item in (await cluster.status())["conditions"]}
    assert types.get("Degraded", "False") == "False"
    assert types["Scheduled"] == "True"
