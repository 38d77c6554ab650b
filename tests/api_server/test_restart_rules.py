"""What a failure leads to, on a real API server: the job's own rules first, then the defaults; and the events."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths


def raised(message: str, **fields: Any) -> dict[str, Any]:
    """The termination message of a rank that raised."""
    return {"version": 1, "outcome": "Failed", "exitCode": 1, "reason": "WorkerException", "message": message} | fields


async def running_gang(cluster: Cluster, **restart: Any) -> list[str]:
    """A job of two nodes that run; the names of its pods by node rank."""
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}} | restart)
    return await run(cluster, 0)


async def run(cluster: Cluster, attempt: int) -> list[str]:
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    return names


async def attempt_is(cluster: Cluster, attempt: int) -> dict[str, Any]:
    await cluster.gang_exists(attempt)
    return await cluster.status()


async def events(cluster: Cluster, reason: str) -> list[str]:
    """Messages of the job's events of one reason, once there are any."""

    async def reported() -> list[str]:
        found, _ = await cluster.client.list(f"/api/v1/namespaces/{cluster.namespace}/events", "events")
        return [event["message"] for event in found if event["reason"] == reason]

    return await eventually_async(reported, f"an event {reason} is posted")


async def bind(cluster: Cluster, pod: str, node: str) -> None:
    """What a scheduler does."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    await cluster.client.create(f"{paths.pods(cluster.namespace)}/{pod}/binding", "pods/binding", body)


def condition(status: dict[str, Any], type_: str) -> dict[str, Any]:
    return next(one for one in status["conditions"] if one["type"] == type_)


async def test_a_rule_fails_a_job_that_would_be_restarted_and_is_named(cluster: Cluster, operator: Operator) -> None:
    rule = {"exitCodes": [3], "messagePattern": "licen[cs]e", "action": "Fail"}
    pods = await running_gang(cluster, rules=[rule])
    await cluster.ends(pods[1], code=3, message=raised("no licence was left"))
    status = await cluster.phase_is("Failed")
    assert (status["attempt"], status["restarts"]) == (0, 0)
    said = "restart.rules[0] (exit code 3, message matches 'licen[cs]e') says Fail"
    assert said in condition(status, "Failed")["message"]
    assert said in (await events(cluster, "Failed"))[0]


async def test_a_rule_restarts_a_job_that_would_fail_without_any_budget(cluster: Cluster, operator: Operator) -> None:
    pods = await running_gang(
        cluster, maxRestarts=0, rules=[{"exitCodes": [64], "action": "RestartAndIgnoreMaxRestarts"}]
    )
    await cluster.ends(pods[0], code=64, message=raised("--data is not there yet", reason="UserError"))
    status = await attempt_is(cluster, 1)
    assert (status["restarts"], status["disruptions"]) == (0, 1)
    assert "says RestartAndIgnoreMaxRestarts; it does not count" in condition(status, "Restarting")["message"]


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("pod_status", "reason"),
    [
        pytest.param(
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            "Evicted",
            id="an eviction for want of memory",
        ),
        pytest.param(
            {
                "phase": "Failed",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
            },
            "Preempted",
            id="a preemption by the scheduler",
        ),
    ],
)
async def test_a_disruption_is_free(cluster: Cluster, operator: Operator, pod_status: Any, reason: str) -> None:
    pods = await running_gang(cluster, maxRestarts=0)
    await cluster.report(pods[1], pod_status)
    status = await attempt_is(cluster, 1)
    assert (status["restarts"], status["disruptions"], status["lastFailure"]["reason"]) == (0, 1, reason)
    assert f"{reason} is a disruption; it does not count" in (await events(cluster, "Restarting"))[0]


async def test_a_rule_excludes_a_node_and_leaves_the_templates_own_affinity(
    cluster: Cluster, operator: Operator
) -> None:
    linux = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [linux]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    await cluster.apply_job(
        restart={"rules": [{"reasons": ["GPUFault"], "action": "ExcludeNode"}], "backoff": {"initialSeconds": 0}},
        podTemplate={"spec": {"schedulerName": "none", "affinity": affinity}},
    )
    for rank, pod in enumerate(await cluster.gang_exists()):
        await bind(cluster, pod["metadata"]["name"], f"gpu-{rank}")
    pods = await run(cluster, 0)
    await cluster.ends(pods[1], code=1, message=raised("CUDA error: uncorrectable ECC error encountered", rank=1))
    for pod in await cluster.gang_exists(1):
        of_nodes = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = of_nodes["nodeSelectorTerms"]
        assert term["matchExpressions"] == [linux]
        assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["gpu-1"]}]
    status = await cluster.status()
    assert (status["excludedNodes"], status["restarts"]) == (["gpu-1"], 1)
    assert status["lastFailure"]["nodeName"] == "gpu-1"
    assert "drain the node" in status["lastFailure"]["advice"]


async def test_pods_prefer_other_nodes_where_karpenter_adds_none_for_those_that_exclude_some(
    cluster: Cluster, operator: Operator
) -> None:
    rules = [{"reasons": ["GPUFault"], "action": "ExcludeNode"}]
    await cluster.apply_job(restart={"rules": rules, "backoff": {"initialSeconds": 0}})
    for rank, pod in enumerate(await cluster.gang_exists()):
        await bind(cluster, pod["metadata"]["name"], f"gpu-{rank}")
    pods = await run(cluster, 0)
    await cluster.ends(pods[1], code=1, message=raised("CUDA error: uncorrectable ECC error encountered", rank=1))
    for pod in await cluster.gang_exists(1):
        unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
        await cluster.report(pod["metadata"]["name"], {"conditions": [unplaced | {"lastTransitionTime": None}]})
        said = "Failed to schedule pod, node selector term with matchFields is not supported"
        await cluster.warn_about(pod["metadata"], "FailedScheduling", said)
    for pod in await cluster.gang_exists(2):
        of_nodes = pod["spec"]["affinity"]["nodeAffinity"]
        assert "requiredDuringSchedulingIgnoredDuringExecution" not in of_nodes
        (term,) = of_nodes["preferredDuringSchedulingIgnoredDuringExecution"]
        not_there = {"key": "metadata.name", "operator": "NotIn", "values": ["gpu-1"]}
        assert term == {"weight": 100, "preference": {"matchFields": [not_there]}}
    status = await cluster.status()
    assert (status["excludedNodes"], status["restarts"], status["disruptions"]) == (["gpu-1"], 1, 0)
    assert "cordon or delete" in condition(status, "Restarting")["message"]


async def test_a_node_that_fails_a_job_often_enough_is_avoided(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"excludeNodeAfter": 2, "backoff": {"initialSeconds": 0}})
    for attempt in range(2):
        for rank, pod in enumerate(await cluster.gang_exists(attempt)):
            await bind(cluster, pod["metadata"]["name"], f"node-{rank}")
        pods = await run(cluster, attempt)
        await cluster.ends(pods[0], code=137)
    status = await attempt_is(cluster, 2)
    assert (status["nodeFailures"], status["excludedNodes"]) == ({"node-0": 2}, ["node-0"])
    assert "node-0, which failed this job 2 times" in condition(status, "Restarting")["message"]
