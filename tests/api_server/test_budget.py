"""How many restarts a job may use up, on a real API server: what counts, what refills it, and what ends it at once."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator

from ddpjob_operator.cluster import paths


def report(step: int, *, snapshot: int | None = None, verified: bool = True, **fields: Any) -> dict[str, Any]:
    """The termination message of a rank that raised at `step`."""
    message = {
        "version": 1,
        "outcome": "Failed",
        "exitCode": 1,
        "reason": "WorkerException",
        "message": f"rank 1 raised ValueError after step {step}: the colour is wrong",
        "rank": 1,
        "step": step,
    }
    if snapshot is not None:
        message["snapshot"] = {"step": snapshot, "time": 1763703999.0, "verified": verified}
    return message | fields


async def fails(cluster: Cluster, attempt: int, message: dict[str, Any]) -> None:
    """All pods of an attempt run, and then one of them ends with `message`."""
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(attempt)]
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    await cluster.ends(names[1], code=1, message=message)


async def apply(cluster: Cluster, **restart: Any) -> None:
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}} | restart)


@pytest.mark.parametrize(
    ("verified", "phase", "restarts"),
    [
        pytest.param(True, "Restarting", 2, id="a verified snapshot ahead of the failure refills it"),
        pytest.param(False, "Failed", 1, id="an unverified one does not"),
    ],
)
async def test_the_budget_is_refilled_by_verified_progress(
    cluster: Cluster, operator: Operator, verified: bool, phase: str, restarts: int
) -> None:
    await apply(cluster, maxRestarts=1)
    await fails(cluster, 0, report(120, snapshot=100))
    await fails(cluster, 1, report(250, snapshot=200, verified=verified))
    status = await cluster.phase_is(phase)
    assert (status["restarts"], status["restartsSinceProgress"]) == (restarts, 1)


async def test_restarts_that_are_older_than_the_window_do_not_count(cluster: Cluster, operator: Operator) -> None:
    await apply(cluster, maxRestarts=1, windowSeconds=600)
    await fails(cluster, 0, report(10))
    await cluster.gang_exists(1)
    path = f"{paths.jobs(cluster.namespace)}/digits/status"
    assert len((await cluster.status())["restartTimes"]) == 1
    past = {"status": {"restartTimes": ["2026-01-01T00:00:00Z"]}}
    await cluster.client.merge_patch(path, "ddpjobs/status", past)
    await fails(cluster, 1, report(11))
    await fails(cluster, 2, report(12))
    status = await cluster.phase_is("Failed")
    failed = next(one for one in status["conditions"] if one["type"] == "Failed")
    assert (status["restarts"], failed["reason"]) == (2, "BackoffLimitExceeded")
    assert failed["message"].startswith("all 1 restarts of the last 600 s are used")


async def test_the_same_error_at_the_same_step_twice_ends_the_job_with_both_in_its_status(
    cluster: Cluster, operator: Operator
) -> None:
    await apply(cluster, maxRestarts=10)
    long = "\n".join(f"  line {number}" for number in range(400))
    await fails(cluster, 0, report(120, snapshot=100, traceback=long))
    await fails(
        cluster, 1, report(120, snapshot=100) | {"rank": 0, "message": report(120)["message"].replace("1", "0", 1)}
    )
    status = await cluster.phase_is("Failed")
    failed = next(one for one in status["conditions"] if one["type"] == "Failed")
    assert (failed["reason"], status["restarts"]) == ("RepeatedFailure", 1)
    assert "attempt 0 failed with the same error at the same step 120" in failed["message"]
    assert [(one["attempt"], one["step"], one["reason"]) for one in status["failures"]] == [
        (0, 120, "WorkerException"),
        (1, 120, "WorkerException"),
    ]
    assert all(len(one["message"]) <= 1024 for one in status["failures"])


async def test_a_wait_before_a_restart_is_on_record_and_kept(cluster: Cluster, operator: Operator) -> None:
    await apply(cluster, backoff={"initialSeconds": 3600, "maxSeconds": 3600})
    await fails(cluster, 0, report(10))
    status = await cluster.phase_is("Restarting")
    assert status["attempt"] == 1
    assert status["restartAt"] > status["lastFailure"]["time"]
    assert not [pod for pod in await cluster.pods() if pod["metadata"]["name"].startswith("digits-1-")]
