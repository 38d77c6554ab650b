"""Data before the gang on a real API server: the initializer's pod, and how its end is read."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.api_server.conftest import StartOperator
from tests.api_server.harness import NO_PROGRESS, Cluster, Operator
from tests.api_server.history import recorded
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths

DATASET = {"name": "dataset", "source": "https://example.com/digits.tar", "path": "datasets/digits.tar"}
MODEL = {"name": "model", "source": "pvc://models/tiny", "path": "models/tiny"}
AT_ONCE = {"backoff": {"initialSeconds": 0, "maxSeconds": 0}}


async def fetcher(cluster: Cluster, number: int = 0) -> dict[str, Any]:
    """Wait for the pod of one try."""
    name = f"digits-init-{number}"

    async def exists() -> dict[str, Any] | None:
        return next((pod for pod in await cluster.pods() if pod["metadata"]["name"] == name), None)

    return await eventually_async(exists, f"{name} exists")


async def ends(cluster: Cluster, number: int, *codes: int, message: str = "") -> None:
    """The containers of one try end with these codes, and with the first that is not 0 the pod does."""
    pod = await fetcher(cluster, number)
    names = [item["name"] for kind in ("initContainers", "containers") for item in pod["spec"].get(kind, ())]
    common = {"image": "x", "imageID": "", "ready": False, "restartCount": 0}
    states = [
        {"name": name, **common, "state": {"terminated": {"exitCode": code, "message": message if code else ""}}}
        for name, code in zip(names, codes, strict=False)
    ]
    count = len(pod["spec"].get("initContainers", ()))
    phase = "Failed" if any(codes) else "Succeeded"
    statuses = {"initContainerStatuses": states[:count], "containerStatuses": states[count:]}
    await cluster.report(pod["metadata"]["name"], {"phase": phase, **statuses})


async def initialized(cluster: Cluster, reason: str) -> dict[str, Any]:
    """Wait for the condition Initialized with a reason, and return it."""

    async def said() -> dict[str, Any] | None:
        conditions = (await cluster.status()).get("conditions") or []
        return next((item for item in conditions if (item["type"], item["reason"]) == ("Initialized", reason)), None)

    return await eventually_async(said, f"Initialized: {reason}")


async def test_the_gang_comes_after_its_data_and_a_restart_does_not_fetch_it_again(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(**NO_PROGRESS)
    job = await cluster.apply_job(initializers=[DATASET, MODEL], restart=AT_ONCE)
    pod = await fetcher(cluster)
    assert [owner["uid"] for owner in pod["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert [item["name"] for item in pod["spec"]["initContainers"]] == ["dataset"]
    assert pod["spec"]["schedulerName"] == "none", "the podTemplate says where it may run"
    await cluster.report("digits-init-0", {"phase": "Running"})
    condition = await initialized(cluster, "Initializing")
    assert condition["status"] == "False"
    assert [found["metadata"]["name"] for found in await cluster.pods()] == ["digits-init-0"]
    await ends(cluster, 0, 0, 0)
    names = [found["metadata"]["name"] for found in await cluster.gang_exists()]
    assert (await initialized(cluster, "DataReady"))["status"] == "True"
    await cluster.runs(*names)
    await cluster.phase_is("Running")
    cost = Counter((entry.verb, entry.resource) for entry in await cluster.cost())
    assert (cost["create", "pods"], cost["delete", "pods"], cost["get", "pods"]) == (3, 0, 0)
    assert cost["patch", "ddpjobs/status"] <= 3, "initializing, starting and running"
    await cluster.ends(names[0], code=1)
    await cluster.gang_exists(attempt=1)
    assert not [found for found in await cluster.pods() if found["metadata"]["name"] == "digits-init-1"]


async def test_a_try_that_fails_is_repeated_and_counted_once_whoever_looks(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    reported = '{"version": 1, "outcome": "Failed", "reason": "FetchFailed", "message": "example.com answered 503"}'
    async with recorded(cluster) as history:
        first = await start_operator()
        await cluster.apply_job(initializers=[DATASET, MODEL], restart=AT_ONCE)
        await fetcher(cluster)
        await first.kill()
        await ends(cluster, 0, 1, message=reported)
        await start_operator()
        await fetcher(cluster, 1)
        await ends(cluster, 1, 0, 0)
        await cluster.gang_exists()
    status = await cluster.status()
    assert (status["initializerFailures"], status.get("restarts", 0)) == (1, 0)
    # the next try follows so soon that a look at the status may miss it
    conditions = [item for seen in history.statuses for item in seen.get("conditions", ())]
    said = {item["message"] for item in conditions if item["reason"] == "InitializerFailed"}
    assert [text.partition(" in ")[0] for text in said] == ["initializer dataset: example.com answered 503; retrying"]

    async def only_the_last_is_left() -> bool:
        fetchers = [pod for pod in await cluster.pods() if "-init-" in pod["metadata"]["name"]]
        return [pod["metadata"]["name"] for pod in fetchers] == ["digits-init-1"]

    await eventually_async(only_the_last_is_left, "the pod of the try that failed is gone")


async def test_what_can_never_work_fails_the_job_by_name(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(initializers=[DATASET, MODEL])
    reported = (
        '{"version": 1, "outcome": "UserError", "reason": "UserError", "message": "there is no pvc://models/tiny"}'
    )
    await ends(cluster, 0, 0, 64, message=reported)
    status = await cluster.phase_is("Failed")
    (failed,) = (item for item in status["conditions"] if item["type"] == "Failed")
    assert (failed["reason"], failed["message"]) == (
        "InitializerFailed",
        "initializer model: there is no pvc://models/tiny",
    )
    assert status["lastFailure"]["podName"] == "digits-init-0"


async def test_a_pod_that_somebody_deletes_is_made_again_and_no_failure(cluster: Cluster, operator: Operator) -> None:
    await cluster.apply_job(initializers=[DATASET])
    before = await fetcher(cluster)
    await cluster.client.delete(f"{paths.pods(cluster.namespace)}/digits-init-0", "pods")

    async def another() -> bool:
        return (await fetcher(cluster))["metadata"]["uid"] != before["metadata"]["uid"]

    await eventually_async(another, "it has been made again")
    assert (await cluster.status()).get("initializerFailures", 0) == 0
