"""What is secret in a job, its pods and their errors is nowhere that others read."""

from __future__ import annotations

import json

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths

SECRET = "hunter2-Zq8vT4rXw1"
MASKED = "***"


@pytest.mark.fault(48)
async def test_a_secret_of_a_variable_in_an_exception_is_in_no_status_event_log_annotation_or_metric(
    cluster: Cluster, operator: Operator
) -> None:
    """It is in the spec, because the author has written it there, and in the pods that it is for; nowhere else."""
    await cluster.apply_job(
        env=[{"name": "WANDB_API_KEY", "value": SECRET}],
        args=[f"--api-key={SECRET}"],
        restart={"maxRestarts": 1, "backoff": {"initialSeconds": 0}},
    )
    for attempt in range(2):
        pods = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
        await cluster.runs(*pods)
        await cluster.phase_is("Running")
        said = {
            "version": 1,
            "outcome": "Failed",
            "exitCode": 1,
            "reason": "WorkerException",
            "message": f"RuntimeError: 401 for api_key={SECRET} at https://user:{SECRET}@example.com/?token={SECRET}",
            "traceback": f"login(key='{SECRET}')",
            "attempt": attempt,
            "rank": 1,
            "nodeRank": 1,
            "step": attempt,
        }
        await cluster.ends(pods[1], code=1, message=said)
    status = await cluster.phase_is("Failed")
    assert "401 for" in json.dumps(status["failures"]), "the rest of the message is kept"
    assert SECRET not in json.dumps(status)

    async def told() -> bool:
        return any(event["reason"] == "Failed" for event in await events(cluster))

    await eventually_async(told, "the end is an event")
    assert SECRET not in json.dumps(await events(cluster))
    assert SECRET not in await operator.metrics()
    assert SECRET not in operator.log.read_text(), "logged at the level DEBUG"
    pods = await cluster.pods()
    others = [await cluster.service(), *(pod["metadata"] for pod in pods), (await cluster.job())["metadata"]]
    assert SECRET not in json.dumps([without_what_its_author_wrote(one) for one in others])


async def events(cluster: Cluster) -> list[dict[str, str]]:
    found, _ = await cluster.client.list(f"{paths.pods(cluster.namespace).rpartition('/')[0]}/events", "events")
    return found


def without_what_its_author_wrote(metadata: dict[str, object]) -> dict[str, object]:
    """managedFields name the fields that a client set, and never their values."""
    return {key: value for key, value in metadata.items() if key != "managedFields"}
