"""A job that is suspended gives its nodes back after a snapshot, and goes on from it with a new attempt."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator
from tests.api_server.history import recorded
from tests.support.waiting import eventually_async

ON_A_NODE = {"podTemplate": {"spec": {"nodeName": "nowhere"}}}
"""A pod that has a node is not gone before its node says so."""

SAVED = {
    "version": 1,
    "outcome": "Preempted",
    "exitCode": 143,
    "reason": "Preempted",
    "message": "stopped by SIGTERM after step 120",
    "attempt": 0,
    "step": 120,
    "snapshot": {"step": 120, "time": 1763703999.0, "verified": True},
}


async def stopping(cluster: Cluster, pods: list[str]) -> list[dict[str, Any]]:
    """Wait until all of these pods are being deleted, and return them."""

    async def reported() -> list[dict[str, Any]] | None:
        found = [pod for pod in await cluster.pods() if "deletionTimestamp" in pod["metadata"]]
        return found if [pod["metadata"]["name"] for pod in found] == pods else None

    return await eventually_async(reported, f"{pods} are being stopped")


async def test_a_running_job_saves_stops_and_resumes_without_a_restart(cluster: Cluster, operator: Operator) -> None:
    async with recorded(cluster) as history:
        await cluster.apply_job(**ON_A_NODE)
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
        await cluster.runs(*pods)
        await cluster.phase_is("Running")

        await cluster.edit_job(suspend=True)
        reported = await stopping(cluster, pods)
        assert [pod["metadata"]["deletionGracePeriodSeconds"] for pod in reported] == [60, 60]
        assert (await cluster.condition("Suspended", "Suspending"))["status"] == "False"
        await cluster.ends(pods[1], code=143)
        await cluster.reap(pods[1])
        await cluster.ends(pods[0], code=143, message=SAVED)

        async def known() -> bool:
            return (await cluster.status()).get("snapshot", {}).get("step") == 120

        await eventually_async(known, "what the first node saved is known")
        assert (await cluster.status())["phase"] == "Running"
        await cluster.reap(pods[0])
        suspended = await cluster.phase_is("Suspended")
        assert suspended["summary"]["nodes"] == "0/2"
        said = await cluster.condition("Suspended", "Suspended")
        assert "resume from the snapshot of step 120" in said["message"]
        assert await cluster.pods() == []

        await cluster.edit_job(suspend=False)
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt=1)]
        await cluster.runs(*pods)
        resumed = await cluster.phase_is("Running")
        await cluster.ends(*pods)
        done = await cluster.phase_is("Succeeded")
    assert (resumed["attempt"], resumed["restarts"], resumed.get("disruptions", 0)) == (1, 0, 0)
    assert "lastFailure" not in done
    assert resumed["suspendedSeconds"] > 0
    assert {item["type"]: item["status"] for item in done["conditions"]}["Suspended"] == "False"
    assert history.broken_rules() == []


async def test_a_job_that_is_created_suspended_costs_one_write_until_it_is_resumed(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(suspend=True)
    await cluster.phase_is("Suspended")
    assert [str(asked) for asked in await cluster.cost()] == ["patch ddpjobs/status digits -> 200"]
    await cluster.edit_job(suspend=False)
    await cluster.gang_exists(attempt=0)
    status = await cluster.phase_is("Starting")
    assert (status.get("attempt", 0), status.get("restarts", 0)) == (0, 0)


@pytest.mark.parametrize("phase", ["Starting", "Restarting"])
async def test_a_job_that_does_not_run_is_suspended_as_well(cluster: Cluster, operator: Operator, phase: str) -> None:
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 600, "maxSeconds": 600}})
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    if phase == "Restarting":
        await cluster.runs(*pods)
        await cluster.phase_is("Running")
        await cluster.ends(pods[0], code=1)
    before = await cluster.phase_is(phase)
    await cluster.edit_job(suspend=True)
    suspended = await cluster.phase_is("Suspended")
    assert "restartAt" not in suspended
    await cluster.edit_job(suspend=False)
    await cluster.gang_exists(attempt=before.get("attempt", 0) + 1)
    assert (await cluster.status())["restarts"] == before.get("restarts", 0)


async def test_an_operator_that_starts_during_a_suspension_does_not_take_it_for_a_failure(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    first = await start_operator()
    await cluster.apply_job(**ON_A_NODE)
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await cluster.edit_job(suspend=True)
    await stopping(cluster, pods)
    await first.kill()
    await cluster.ends(*pods, code=137)
    await cluster.edit_job(suspend=False)
    await start_operator()
    await cluster.reap(*pods)
    await cluster.gang_exists(attempt=1)
    status = await cluster.status()
    assert status["restarts"] == 0
    assert "lastFailure" not in status
