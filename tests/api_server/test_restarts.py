"""What a failure costs and leads to: one restart, counted once, of the whole gang."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import NO_PROGRESS, Cluster, Operator
from tests.api_server.history import recorded
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.errors import ApiError

KILLED = {
    "version": 1,
    "outcome": "Failed",
    "exitCode": 1,
    "reason": "WorkerKilled",
    "message": "rank 1 was killed by SIGKILL after step 120",
    "nodeRank": 1,
    "rank": 1,
    "attempt": 0,
    "step": 120,
    "snapshot": {"step": 100, "time": 1763703999.0, "verified": True},
}


async def running_gang(cluster: Cluster, nodes: int = 2, **spec: object) -> list[str]:
    """A job all of whose nodes run; the names of its pods by node rank."""
    await cluster.apply_job(nodes=nodes, restart={"backoff": {"initialSeconds": 0}}, **spec)
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=nodes)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    return names


async def finish_attempt(cluster: Cluster, attempt: int, nodes: int = 2) -> dict:
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt, nodes)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    await cluster.ends(*names)
    return await cluster.phase_is("Succeeded")


async def test_a_failed_pod_costs_one_restart_of_three_n_plus_two_writes(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(**NO_PROGRESS)
    pods = await running_gang(cluster, nodes=3)
    before = len(await cluster.cost())
    await cluster.ends(pods[1], code=1, message=KILLED)
    await cluster.gang_exists(attempt=1, nodes=3)

    async def settled() -> bool:
        return {pod["metadata"]["name"] for pod in await cluster.pods()} == {f"digits-1-{rank}" for rank in range(3)}

    await eventually_async(settled, "only the new gang is there")
    asked = (await cluster.cost())[before:]
    assert {(entry.resource, entry.name) for entry in asked if entry.verb == "get"} <= {("pods/log", pods[1])}
    assert Counter((entry.verb, entry.resource) for entry in asked if entry.verb != "get") == {
        ("patch", "ddpjobs/status"): 1,
        ("patch", "services"): 1,
        ("delete", "pods"): 3,
        ("patch", "pods"): 3,  # their finalizers
        ("create", "pods"): 3,
    }


async def test_a_restart_is_on_record_before_its_pods_and_counted_once(cluster: Cluster, operator: Operator) -> None:
    async with recorded(cluster) as history:
        pods = await running_gang(cluster)
        await cluster.ends(pods[1], code=1, message=KILLED)
        status = await finish_attempt(cluster, 1)
    assert history.broken_rules() == []
    assert (status["attempt"], status["restarts"]) == (1, 1)


async def test_the_status_says_which_rank_failed_why_and_what_to_resume_from(
    cluster: Cluster, operator: Operator
) -> None:
    pods = await running_gang(cluster)
    await cluster.ends(pods[1], code=1, message=KILLED)
    await cluster.gang_exists(attempt=1)
    status = await cluster.status()
    failure = status["lastFailure"]
    assert (failure["podName"], failure["nodeRank"], failure["rank"]) == (pods[1], 1, 1)
    assert (failure["reason"], failure["step"], failure["exitCode"]) == ("WorkerKilled", 120, 1)
    assert status["snapshot"]["step"] == 100


async def test_the_service_selects_node_rank_0_of_the_new_attempt(cluster: Cluster, operator: Operator) -> None:
    pods = await running_gang(cluster)
    await cluster.ends(pods[0], code=1)
    await cluster.gang_exists(attempt=1)

    async def points() -> bool:
        return (await cluster.service())["spec"]["selector"]["training.ddpjob.io/attempt"] == "1"

    await eventually_async(points, "the Service selects attempt 1")


@pytest.mark.fault(29)
async def test_all_pods_failing_at_once_is_one_restart(cluster: Cluster, operator: Operator) -> None:
    pods = await running_gang(cluster, nodes=4)
    await cluster.ends(*pods, code=1, message=KILLED)
    status = await finish_attempt(cluster, 1, nodes=4)
    assert (status["attempt"], status["restarts"]) == (1, 1)


async def test_a_deleted_pod_is_a_failure_that_names_it(cluster: Cluster, operator: Operator) -> None:
    pods = await running_gang(cluster)
    await cluster.client.delete(f"/api/v1/namespaces/{cluster.namespace}/pods/{pods[1]}", "pods")
    status = await finish_attempt(cluster, 1)
    assert status["restarts"] == 1
    assert status["lastFailure"]["reason"] == "PodDeleted"
    assert status["lastFailure"]["podName"] == pods[1]


async def test_an_error_of_the_user_fails_the_job_without_a_second_attempt(
    cluster: Cluster, operator: Operator
) -> None:
    pods = await running_gang(cluster)
    message = KILLED | {
        "outcome": "UserError",
        "exitCode": 64,
        "reason": "ImportError",
        "message": "No module named 'nope'",
    }
    await cluster.ends(pods[0], code=64, message=message)
    status = await cluster.phase_is("Failed")
    assert status["attempt"] == 0
    assert "nope" in status["lastFailure"]["message"]
    left = {pod["metadata"]["name"] for pod in await cluster.pods()}
    assert not any(name.startswith("digits-1-") for name in left)


async def test_a_job_fails_when_its_restarts_are_used_up(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"maxRestarts": 1, "backoff": {"initialSeconds": 0}})
    for attempt in range(2):
        names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
        await cluster.runs(*names)
        await cluster.phase_is("Running")
        await cluster.ends(names[0], code=1)
    status = await cluster.phase_is("Failed")
    assert (status["attempt"], status["restarts"]) == (1, 1)


async def test_events_tell_the_story_of_the_job(cluster: Cluster, operator: Operator) -> None:
    pods = await running_gang(cluster)
    await cluster.ends(pods[1], code=1, message=KILLED)
    await finish_attempt(cluster, 1)

    async def reported() -> list[str] | None:
        events, _ = await cluster.client.list(f"/api/v1/namespaces/{cluster.namespace}/events", "events")
        ours = [event for event in events if event["involvedObject"]["kind"] == "DDPJob"]
        reasons = [event["reason"] for event in sorted(ours, key=lambda event: event["metadata"]["name"])]
        return reasons if "Succeeded" in reasons else None

    story = await eventually_async(reported, "the last event is posted")
    assert story == ["Starting", "Running", "Restarting", "Running", "Succeeded"]


@pytest.mark.fault(25)
@pytest.mark.parametrize("code", [1, 0], ids=["failed and then running", "succeeded and then failed"])
async def test_a_pod_whose_final_phase_changes_counts_by_the_first_one(
    cluster: Cluster, operator: Operator, code: int
) -> None:
    """What a kubelet reports after it has lost its own records."""
    await cluster.apply_job(nodes=2, restart={"maxRestarts": 1, "backoff": {"initialSeconds": 0}})
    first, second = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    for pod in (first, second):
        await cluster.bound(pod, "node-of-nobody")  # so that a deletion waits for its kubelet
    await cluster.runs(first, second)
    await cluster.phase_is("Running")
    path = f"{paths.pods(cluster.namespace)}/{second}"
    held = (await cluster.client.get(path, "pods"))["metadata"].get("finalizers", [])
    # a pod that has failed is gone as soon as it is deleted
    await cluster.client.merge_patch(path, "pods", {"metadata": {"finalizers": [*held, "test.ddpjob.io/x"]}})
    await cluster.ends(second, code=code)
    if code:

        async def on_record() -> bool:
            return bool((await cluster.status())["restarts"])

        await eventually_async(on_record, "the failure is on record")
        await cluster.report(second, {"phase": "Running", "containerStatuses": []})
        await cluster.client.merge_patch(path, "pods", {"metadata": {"finalizers": None}})
        await cluster.reap(first)
        with suppress(ApiError):
            await cluster.reap(second)
        new = [pod["metadata"]["name"] for pod in await cluster.gang_exists(1)]
        await cluster.runs(*new)
        await cluster.phase_is("Running")
        await cluster.ends(*new)
    else:
        await seen_by_the_operator(cluster)
        await cluster.ends(second, code=1)
        await seen_by_the_operator(cluster)
        await cluster.ends(first)
    status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (code, code)


async def seen_by_the_operator(cluster: Cluster) -> None:
    """That a pod runs which is made now comes through the same watch of pods, so what came before has been seen."""
    name = f"later-{len((await cluster.client.list(paths.jobs(cluster.namespace), 'ddpjobs'))[0])}"
    await cluster.apply_job(name, nodes=1)
    await cluster.gang_exists(nodes=1, job=name)
    await cluster.runs(f"{name}-0-0")
    await cluster.phase_is("Running", name)


async def test_a_service_that_was_deleted_under_a_running_gang_is_there_for_the_next_one(
    cluster: Cluster, operator: Operator
) -> None:
    """No watch reports it: the patch for the next attempt finds none, and its pods get the new one's address."""
    pods = await running_gang(cluster)
    old = await cluster.service()
    await cluster.client.delete(f"{paths.services(cluster.namespace)}/digits-rdzv", "services")
    await cluster.ends(pods[1], code=1, message=KILLED)
    made = await cluster.gang_exists(attempt=1)
    service = await cluster.service()
    assert service["metadata"]["uid"] != old["metadata"]["uid"]
    assert service["spec"]["selector"]["training.ddpjob.io/attempt"] == "1"
    for pod in made:
        variables = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        assert variables["DDPJOB_RDZV_HOST"] == service["spec"]["clusterIP"]
    assert (await finish_attempt(cluster, 1))["restarts"] == 1
