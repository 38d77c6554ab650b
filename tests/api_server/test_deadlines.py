"""A job that takes too long fails at that moment, for a reason of its own."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async


def age(status: dict[str, Any]) -> timedelta:
    return datetime.fromisoformat(status["completionTime"]) - datetime.fromisoformat(status["startTime"])


async def test_a_job_that_is_active_for_too_long_fails_and_its_pods_may_save(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(podTemplate={"spec": {"nodeName": "nowhere"}})
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(*pods)
    await cluster.phase_is("Running")
    await cluster.edit_job(activeDeadlineSeconds=4)  # may be set, and changed, while the job runs
    status = await cluster.phase_is("Failed")
    failed = await cluster.condition("Failed", "DeadlineExceeded")
    assert "active for 4 s (activeDeadlineSeconds)" in failed["message"]
    assert status["lastFailure"]["reason"] == "DeadlineExceeded"
    assert age(status) >= timedelta(seconds=4)

    async def may_save() -> bool:
        return [pod["metadata"].get("deletionGracePeriodSeconds") for pod in await cluster.pods()] == [60, 60]

    await eventually_async(may_save, "both pods are deleted with all the grace that they have")


@pytest.mark.fault(26, 27)
async def test_a_gang_that_does_not_start_fails_the_job_with_the_last_known_trouble(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job()
    pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists()]
    await cluster.runs(pods[0])
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes fit"}
    await cluster.report(pods[1], {"phase": "Pending", "conditions": [unschedulable]})
    degraded = await cluster.condition("Degraded", "Unschedulable")
    assert degraded["status"] == "True"
    await cluster.edit_job(startupDeadlineSeconds=5)  # may be set while it starts; the trouble is known by now
    status = await cluster.phase_is("Failed")
    failed = await cluster.condition("Failed", "StartupDeadlineExceeded")
    assert "attempt 0 did not start within 5 s (startupDeadlineSeconds)" in failed["message"]
    assert "Unschedulable: pod digits-0-1: 0/2 nodes fit" in failed["message"]
    assert age(status) >= timedelta(seconds=5)


async def test_a_gang_that_the_api_server_refuses_fails_the_job_at_its_deadline_too(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(podTemplate={"spec": {"serviceAccountName": "nobody"}})
    await cluster.condition("Degraded", "Forbidden")
    await cluster.edit_job(startupDeadlineSeconds=4)
    failed = await cluster.condition("Failed", "StartupDeadlineExceeded")
    assert 'serviceaccount "nobody" not found' in failed["message"]
    assert await cluster.pods() == []
