"""How pods ended is on record before they vanish, and no finalizer keeps a pod or a namespace for ever."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Object, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.release import release_everywhere
from ddpjob_operator.core.values.names import FINALIZER, LABEL_MANAGED_BY
from ddpjob_operator.runtime.errors import ApiError


async def a_gang_runs(cluster: Cluster, **spec: Any) -> list[str]:
    await cluster.apply_job(restart={"maxRestarts": 0}, **spec)
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    return names


async def no_pod_is_left(cluster: Cluster) -> None:
    async def gone() -> bool:
        return not await cluster.pods()

    await eventually_async(gone, "every pod is gone")


async def delete_job(cluster: Cluster, policy: str) -> None:
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
    await cluster.client.delete(f"{paths.jobs(cluster.namespace)}/digits", "ddpjobs", body)


async def test_a_gang_that_was_collected_while_the_operator_was_away_has_succeeded(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    operator = await start_operator()
    names = await a_gang_runs(cluster)
    await operator.kill()
    await cluster.ends(*names)
    await cluster.reap(*names)
    assert len(await cluster.pods()) == 2, "their end is not on record"
    await start_operator()
    status = await cluster.phase_is("Succeeded")
    assert (status["restarts"], status["disruptions"]) == (0, 0)
    await no_pod_is_left(cluster)


async def test_a_node_that_is_done_may_be_drained_while_another_works(cluster: Cluster, operator: Operator) -> None:
    first, second = await a_gang_runs(cluster)
    await cluster.ends(second)
    await cluster.reap(second)

    async def only_the_first() -> bool:
        return [pod["metadata"]["name"] for pod in await cluster.pods()] == [first]

    await eventually_async(only_the_first, "the pod that is done is gone")
    await cluster.ends(first)
    assert (await cluster.phase_is("Succeeded"))["restarts"] == 0
    await cluster.released()
    assert [pod["metadata"]["name"] for pod in await cluster.pods()] == [first]


@pytest.mark.parametrize("policy", ["Background", "Foreground", "Orphan"])
async def test_no_pod_outlives_its_job_for_its_finalizer(cluster: Cluster, operator: Operator, policy: str) -> None:
    names = await a_gang_runs(cluster)
    assert await cluster.finalizers() == [FINALIZER] * 2
    await delete_job(cluster, policy)
    if policy == "Orphan":
        await cluster.released()
        assert [pod["metadata"]["name"] for pod in await cluster.pods()] == names, "and go on"
        await cluster.reap(*names)
    await no_pod_is_left(cluster)


async def test_a_job_that_was_deleted_while_the_operator_was_away_leaves_nothing(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    operator = await start_operator()
    await a_gang_runs(cluster)
    await operator.kill()
    await delete_job(cluster, "Background")

    async def deleted() -> bool:
        return all("deletionTimestamp" in pod["metadata"] for pod in await cluster.pods())

    await eventually_async(deleted, "the garbage collector deletes them")
    assert len(await cluster.pods()) == 2
    await start_operator()
    await no_pod_is_left(cluster)


async def test_a_pod_that_has_lost_our_label_is_let_go(cluster: Cluster, operator: Operator) -> None:
    _, second = await a_gang_runs(cluster)
    path = f"{paths.pods(cluster.namespace)}/{second}"
    await cluster.client.merge_patch(path, "pods", {"metadata": {"labels": {LABEL_MANAGED_BY: None}}})

    async def released() -> bool:
        pod = await cluster.client.get(path, "pods")
        return not pod["metadata"].get("finalizers")

    await eventually_async(released, "it has no finalizer any more")


async def test_a_namespace_is_deleted_with_its_jobs(cluster: Cluster, operator: Operator) -> None:
    await a_gang_runs(cluster)
    await cluster.delete_namespace()
    seen: list[Object] = []

    async def gone() -> bool:
        seen[:] = [*await cluster.pods()]
        try:
            found = await cluster.client.get(f"/api/v1/namespaces/{cluster.namespace}", "namespaces")
        except ApiError as error:
            return error.not_found
        seen.append(found["status"])
        return False

    await eventually_async(gone, "the namespace is gone", instead=lambda: str(seen))


async def test_without_an_operator_one_command_lets_every_pod_go(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    operator = await start_operator()
    names = await a_gang_runs(cluster)
    await operator.kill()
    assert await release_everywhere(cluster.client, (cluster.namespace,)) == 2
    await cluster.reap(*names)
    assert await cluster.pods() == []
