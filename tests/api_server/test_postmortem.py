"""What is known of a job after its pods are gone: why it failed, and where its time went."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

MESSAGE = {
    "version": 1,
    "outcome": "Failed",
    "exitCode": 1,
    "reason": "WorkerException",
    "message": "rank 1 raised RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "nodeRank": 1,
    "rank": 1,
    "traceback": "Traceback (most recent call last):\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "step": 120,
    "snapshot": {"step": 100, "time": 1763703999.0, "verified": True},
}


async def fail_on_node_rank_1(cluster: Cluster, **spec: Any) -> dict[str, Any]:
    """The status of a job without a second chance, one of whose pods has failed with that message."""
    await cluster.apply_job(restart={"maxRestarts": 0}, **spec)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    uid = (await cluster.job())["metadata"]["uid"]
    await cluster.ends(pods[1], code=1, message=MESSAGE | {"uid": uid, "attempt": 0})
    return await cluster.phase_is("Failed")


async def none_left(cluster: Cluster) -> bool:
    return await cluster.pods() == []


async def test_the_first_failure_is_kept_when_every_pod_is_gone(cluster: Cluster, operator: Operator) -> None:
    await fail_on_node_rank_1(cluster, cleanPodPolicy="All")
    await eventually_async(lambda: none_left(cluster), "all pods are deleted")
    failure = (await cluster.status())["lastFailure"]
    assert (failure["podName"], failure["nodeRank"], failure["rank"], failure["exitCode"]) == (
        "digits-0-1",
        1,
        1,
        1,
    )
    assert (failure["step"], failure["snapshotStep"]) == (120, 100)
    assert "CUDA out of memory" in failure["message"]
    assert "reduce the micro-batch" in failure["advice"]


async def test_the_log_of_a_failed_pod_is_asked_for_before_any_pod_is_deleted(
    cluster: Cluster, operator: Operator
) -> None:
    await fail_on_node_rank_1(cluster, cleanPodPolicy="All")
    await eventually_async(lambda: none_left(cluster), "all pods are deleted")
    asked = [(entry.verb, entry.resource, entry.name) for entry in await cluster.asked()]
    read = asked.index(("get", "pods/log", "digits-0-1"))
    deleted = [number for number, (verb, resource, _) in enumerate(asked) if (verb, resource) == ("delete", "pods")]
    assert deleted
    assert read < min(deleted)


async def test_the_ledger_of_a_job_with_a_restart_adds_up_to_its_time(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    for attempt in (0, 1):
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
        await cluster.placed(*pods)
        await cluster.runs(*pods)
        await cluster.phase_is("Running")
        if attempt == 0:
            await cluster.ends(pods[1], code=1)
    await cluster.ends(*pods)
    status = await cluster.phase_is("Succeeded")
    assert status["restarts"] == 1
    ledger = status["goodput"]
    spent = {name: value for name, value in ledger.items() if isinstance(value, float | int) and name not in NO_SECONDS}
    began, ended = (datetime.fromisoformat(status[name]) for name in ("startTime", "completionTime"))
    assert abs(sum(spent.values()) - (ended - began).total_seconds()) < 0.002, spent

    async def is_on_the_page() -> bool:
        page = await operator.metrics()
        lines = (line for line in page.splitlines() if line.startswith("ddpjob_status_activity_seconds{"))
        shown = [float(line.rpartition(" ")[2]) for line in lines if cluster.namespace in line]
        return abs(sum(shown) - sum(spent.values())) < 0.002

    # the page follows the watch, which may be behind the answer to this test
    await eventually_async(is_on_the_page, "the page shows the ledger of the job")


NO_SECONDS = ("ratio", "recomputedSteps")
"""Fields of the ledger that are no times."""
