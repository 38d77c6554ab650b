"""What may change while a job runs takes effect: at once, or with the next attempt where pods carry it."""

from __future__ import annotations

from typing import Any

from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async


def environment(pod: dict[str, Any]) -> dict[str, str]:
    (trainer,) = pod["spec"]["containers"]
    return {item["name"]: item.get("value", "") for item in trainer["env"]}


async def running(cluster: Cluster, attempt: int = 0) -> list[str]:
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    return names


async def test_snapshots_and_stall_limits_change_with_the_next_attempt_and_nothing_restarts_before(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    pods = await running(cluster)
    edited = await cluster.edit_job(
        snapshots={"every": "7steps", "keep": 2}, stall={"minSeconds": 5, "maxSeconds": 60}, activeDeadlineSeconds=3600
    )

    async def seen() -> bool:
        return (await cluster.status())["observedGeneration"] == edited["metadata"]["generation"]

    await eventually_async(seen, "the edit is seen")
    assert [pod["metadata"]["name"] for pod in await cluster.pods()] == pods
    await cluster.ends(pods[0], code=1)
    (first, _) = await cluster.gang_exists(attempt=1)
    reported = environment(first)
    assert (reported["DDPJOB_SNAPSHOT_EVERY"], reported["DDPJOB_SNAPSHOT_KEEP"]) == ("7steps", "2")
    assert (reported["DDPJOB_STALL_MIN_SECONDS"], reported["DDPJOB_STALL_MAX_SECONDS"]) == ("5", "60")


async def test_a_job_goes_on_as_before_an_edit_that_cannot_be_understood(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    pods = await running(cluster)
    await cluster.edit_job(restart={"rules": [{"messagePattern": "(", "action": "Fail"}]})
    condition = await cluster.condition("Degraded", "InvalidSpec")
    assert "spec.restart.rules[0].messagePattern" in condition["message"]
    assert "the job goes on with the previous spec" in condition["message"]
    await cluster.ends(pods[0], code=1)
    again = await running(cluster, attempt=1)
    await cluster.edit_job(restart={"rules": None})
    await cluster.condition("Degraded", "AsExpected")
    await cluster.ends(*again)
    await cluster.phase_is("Succeeded")


async def test_an_operator_that_only_knows_a_job_with_an_unreadable_rule_brings_it_to_its_end(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    first = await start_operator()
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    pods = await running(cluster)
    await cluster.edit_job(restart={"rules": [{"messagePattern": "(", "action": "Fail"}]})
    await cluster.condition("Degraded", "InvalidSpec")
    await first.stop()
    await start_operator()

    async def said() -> bool:
        conditions = {item["type"]: item for item in (await cluster.status())["conditions"]}
        return str(conditions["Degraded"]["message"]).endswith("; the job goes on without rules that cannot be read")

    await eventually_async(said, "the next operator says what it does")
    await cluster.ends(pods[0], code=1)
    await cluster.ends(*await running(cluster, attempt=1))
    await cluster.phase_is("Succeeded")


async def test_the_budget_of_restarts_may_shrink_while_the_job_runs(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(restart={"maxRestarts": 5, "backoff": {"initialSeconds": 0}})
    pods = await running(cluster)
    await cluster.edit_job(restart={"maxRestarts": 0})
    await cluster.ends(pods[0], code=1)
    status = await cluster.phase_is("Failed")
    assert (status.get("attempt", 0), status["restarts"]) == (0, 0)


async def test_a_deadline_and_the_clean_up_may_change_while_the_job_runs(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(activeDeadlineSeconds=1000)
    pods = await running(cluster)
    await cluster.edit_job(activeDeadlineSeconds=None, cleanPodPolicy="All")
    await cluster.ends(*pods)
    await cluster.phase_is("Succeeded")

    async def clean() -> bool:
        return await cluster.pods() == []

    await eventually_async(clean, "its pods are gone")
