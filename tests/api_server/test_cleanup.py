"""When a job has succeeded, what is left of it then, and whose job it was."""

from __future__ import annotations

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.runtime.errors import ApiError

NO_EXPRESSION = {"rules": [{"messagePattern": "(", "action": "Fail"}]}
"""What no API server refuses, with CEL or without, and the operator does."""


@pytest.mark.parametrize(
    ("policy", "left"),
    [("None", ["digits-0-0", "digits-0-1"]), ("Running", ["digits-0-0"]), ("All", [])],
)
async def test_a_job_whose_first_node_is_enough_leaves_the_pods_that_its_policy_keeps(
    cluster: Cluster, operator: Operator, policy: str, left: list[str]
) -> None:
    await cluster.apply_job(successPolicy="FirstNode", cleanPodPolicy=policy)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await cluster.ends(pods[0])
    status = await cluster.phase_is("Succeeded")
    assert status["restarts"] == 0

    async def cleaned() -> bool:
        return [pod["metadata"]["name"] for pod in await cluster.pods()] == left

    await eventually_async(cleaned, f"{left} are left")


async def test_pods_that_have_exited_stay_although_their_phase_still_says_running(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job()
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await cluster.ends(*pods, phase="Running")
    await cluster.phase_is("Succeeded")
    await cluster.ends(*pods)
    assert [pod["metadata"]["name"] for pod in await cluster.pods()] == pods
    assert [asked for asked in await cluster.cost() if asked.verb == "delete"] == []


async def test_a_job_is_deleted_when_its_time_to_live_is_up(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(ttlSecondsAfterFinished=3600)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.ends(*pods)
    await cluster.phase_is("Succeeded")
    await cluster.edit_job(ttlSecondsAfterFinished=2)  # may change after the end as well

    async def gone() -> bool:
        try:
            await cluster.job()
        except ApiError as error:
            return error.not_found
        return False

    await eventually_async(gone, "the job is gone")

    async def collected() -> bool:
        return await cluster.pods() == []

    await eventually_async(collected, "its pods are gone with it")
    deleted = [str(asked) for asked in await cluster.cost() if asked.verb == "delete"]
    assert deleted == ["delete ddpjobs digits -> 200"]


async def test_a_job_of_another_controller_is_left_alone_even_if_it_makes_no_sense(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(managedBy="kueue.x-k8s.io/multikueue", ttlSecondsAfterFinished=0)
    await cluster.apply_job("broken", managedBy="kueue.x-k8s.io/multikueue", restart=NO_EXPRESSION)
    await cluster.apply_job("ours", managedBy="training.ddpjob.io/operator")
    await cluster.gang_exists(job="ours")
    await cluster.phase_is("Starting", "ours")
    assert {asked.name.partition("-")[0] for asked in await cluster.cost() if asked.name} == {"ours"}
    for name in ("digits", "broken"):
        assert await cluster.status(name) == {}
    page = ""

    async def is_shown() -> bool:
        nonlocal page
        page = await operator.metrics()
        return f'ddpjob="ours",namespace="{cluster.namespace}"' in page

    await eventually_async(is_shown, "the operator shows its own job")
    assert f'ddpjob="digits",namespace="{cluster.namespace}"' not in page
