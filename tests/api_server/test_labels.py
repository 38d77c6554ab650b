"""Labels are hints: what the operator makes of pods whose labels, or owners, somebody has changed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths

ATTEMPT, NODE_RANK = "training.ddpjob.io/attempt", "training.ddpjob.io/node-rank"


async def running(cluster: Cluster) -> dict[str, str]:
    """A gang of two that runs: uids by name."""
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.gang_exists()}
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    return pods


async def relabel(cluster: Cluster, pod: str, labels: dict[str, str | None]) -> None:
    body = {"metadata": {"labels": labels}}
    await cluster.client.merge_patch(f"{paths.pods(cluster.namespace)}/{pod}", "pods", body)


async def uids(cluster: Cluster) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.pods()}


@pytest.mark.fault(19)
@pytest.mark.parametrize(
    ("labels", "attempt"),
    [({ATTEMPT: "11"}, 12), ({ATTEMPT: None}, 1), ({NODE_RANK: "7"}, 1), ({ATTEMPT: "x", NODE_RANK: None}, 1)],
    ids=["a newer attempt", "no attempt", "a rank beyond the size", "no labels that say anything"],
)
async def test_forged_labels_cost_one_restart_and_leave_no_pod_behind(
    cluster: Cluster, operator: Operator, labels: dict[str, str | None], attempt: int
) -> None:
    old = await running(cluster)
    await relabel(cluster, "digits-0-1", labels)
    new = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.gang_exists(attempt)}

    async def only_the_new_ones() -> bool:
        return await uids(cluster) == new

    await eventually_async(only_the_new_ones, "the pods of the first attempt are gone")
    await cluster.runs(*new)
    await cluster.phase_is("Running")
    await cluster.ends(*new)
    status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (attempt, 1)
    assert not old.keys() & new.keys()


@pytest.mark.fault(19)
async def test_a_pod_of_another_controller_with_the_labels_of_a_job_is_left_alone(
    cluster: Cluster, operator: Operator
) -> None:
    gang = await running(cluster)
    real: Any = next(pod for pod in await cluster.pods() if pod["metadata"]["name"] == "digits-0-1")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "web"}}
    made = await cluster.client.create(f"/api/v1/namespaces/{cluster.namespace}/configmaps", "configmaps", config)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "web", "uid": made["metadata"]["uid"], "controller": True}
    labels = real["metadata"]["labels"] | {ATTEMPT: "50"}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web-1", "labels": labels, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "web", "image": "web"}]},
    }
    await cluster.client.create(paths.pods(cluster.namespace), "pods", manifest)
    await cluster.ends(*gang)
    status = await cluster.phase_is("Succeeded")
    assert (status["attempt"], status["restarts"]) == (0, 0)
    assert (await uids(cluster)).keys() == gang.keys() | {"web-1"}
