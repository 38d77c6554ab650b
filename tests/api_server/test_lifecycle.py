"""A job from its creation to its end, and what that costs the API server."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import NO_PROGRESS, Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.runtime.errors import ApiError

STOP_SECONDS = 30.0
"""A pod's usual grace period, which all parts of the operator together take less of."""


def owners(obj: dict) -> list[tuple[str, str, bool]]:
    return [(ref["kind"], ref["uid"], ref["controller"]) for ref in obj["metadata"].get("ownerReferences", ())]


async def finish(cluster: Cluster, nodes: int = 2) -> None:
    """A gang that succeeds, as its kubelets would report it."""
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=nodes)]
    await cluster.phase_is("Starting")
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    await cluster.ends(*names)
    await cluster.phase_is("Succeeded")


async def test_a_new_job_gets_its_service_claim_and_pods_with_owner_and_labels(
    cluster: Cluster, operator: Operator
) -> None:
    job = await cluster.apply_job(nodes=3)
    uid = job["metadata"]["uid"]
    pods = await cluster.gang_exists(nodes=3)
    for rank, pod in enumerate(pods):
        assert owners(pod) == [("DDPJob", uid, True)]
        labels = pod["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "ddpjob"
        assert labels["training.ddpjob.io/uid"] == uid
        assert labels["training.ddpjob.io/attempt"] == "0"
        assert labels["training.ddpjob.io/node-rank"] == str(rank)
    service = await cluster.service()
    assert owners(service) == [("DDPJob", uid, True)]
    assert service["spec"]["selector"]["training.ddpjob.io/attempt"] == "0"
    claim = await cluster.client.get(
        f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims/digits-shared", "persistentvolumeclaims"
    )
    assert owners(claim) == []  # it is retained by default


async def test_pods_are_given_the_address_of_the_service(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    pods = await cluster.gang_exists()
    service = await cluster.service()
    for pod in pods:
        env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        assert env["DDPJOB_RDZV_HOST"] == service["spec"]["clusterIP"]


async def test_a_gang_that_runs_and_finishes_makes_the_job_succeed(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    await finish(cluster)
    status = await cluster.status()
    assert status["summary"]["nodes"] == "2/2"
    assert status.get("restarts", 0) == 0
    assert status["completionTime"] >= status["startTime"]


async def test_a_job_that_succeeds_costs_its_children_and_three_status_writes_and_no_get(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(**NO_PROGRESS)
    await cluster.apply_job(nodes=4)
    await finish(cluster, nodes=4)
    await cluster.released()
    cost = Counter((entry.verb, entry.resource) for entry in await cluster.cost())
    assert cost == {
        ("create", "services"): 1,
        ("create", "persistentvolumeclaims"): 1,
        ("create", "pods"): 4,
        ("patch", "pods"): 4,  # the finalizer
        ("patch", "ddpjobs/status"): 3,
    }


async def test_pods_that_become_ready_one_by_one_cost_no_write_each(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(**NO_PROGRESS)
    await cluster.apply_job(nodes=4)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=4)]
    for pod in pods:
        await cluster.runs(pod)
    await cluster.phase_is("Running")
    writes = [entry for entry in await cluster.cost() if entry.resource == "ddpjobs/status"]
    assert len(writes) == 2  # Starting, Running


async def test_a_resync_of_a_job_at_rest_writes_nothing(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator(RESYNC_SECONDS=1)
    await cluster.apply_job()
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    before = await cluster.cost()

    async def resyncs() -> float:
        page = await operator.metrics()
        return float(page.split('ddpjob_operator_resyncs_total{result="done"} ')[1].split()[0])

    async def resynced() -> bool:
        return await resyncs() >= before_resyncs + 3

    before_resyncs = await resyncs()
    await eventually_async(resynced, "three more resyncs are done")
    assert await cluster.cost() == before


async def test_a_restarted_operator_takes_over_a_running_job_without_changing_anything(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    first = await start_operator()
    await cluster.apply_job()
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names)
    running = await cluster.phase_is("Running")
    assert await first.stop(seconds=STOP_SECONDS) == 0
    before = len(await cluster.cost())
    second = await start_operator()

    async def taken_over() -> bool:
        return 'ddpjob_status_phase{ddpjob="digits"' in await second.metrics()

    await eventually_async(taken_over, "the second operator has looked at the job and has nothing left to do")
    assert await cluster.status() == running
    new = (await cluster.cost())[before:]
    assert [entry for entry in new if entry.code < 300 and entry.verb != "get"] == []


async def test_deleting_a_job_leaves_nothing_but_the_claim_that_is_kept(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job()
    await cluster.gang_exists()
    await cluster.delete_job()

    async def gone() -> bool:
        try:
            await cluster.service()
        except ApiError as error:
            return error.not_found and not await cluster.pods()
        return False

    await eventually_async(gone, "pods and service are collected")
    claims, _ = await cluster.client.list(
        f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims", "persistentvolumeclaims"
    )
    assert [claim["metadata"]["name"] for claim in claims] == ["digits-shared"]


@pytest.mark.fault(15)
async def test_a_job_deleted_while_the_operator_is_away_is_forgotten(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    first = await start_operator()
    await cluster.apply_job()
    await cluster.gang_exists()
    await first.kill()
    await cluster.delete_job()
    second = await start_operator()

    async def forgotten() -> bool:
        page = await second.metrics()
        return 'ddpjob_status_phase{ddpjob="digits"' not in page and not await cluster.pods()

    await eventually_async(forgotten, "nothing is left of it")


async def test_a_job_of_the_same_name_starts_over_with_the_claim_that_was_kept(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job()
    old = {pod["metadata"]["uid"] for pod in await cluster.gang_exists()}
    await cluster.delete_job()
    job = await cluster.apply_job()

    async def new_gang() -> bool:
        pods = await cluster.pods()
        fresh = [pod for pod in pods if pod["metadata"]["uid"] not in old]
        return len(fresh) == 2 and all(owners(pod) == [("DDPJob", job["metadata"]["uid"], True)] for pod in fresh)

    await eventually_async(new_gang, "the new job has pods of its own")
    await finish(cluster)
