"""Whatever goes wrong with any single call, the job ends as if nothing had.

As Sieve does (OSDI 2022): take the calls of a fault-free job, repeat that job once for each call and each kind of
fault, and compare the ends. The rules of `history` hold at every moment of every job.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.api_server.conftest import NewCluster
from tests.api_server.harness import Cluster, Operator
from tests.api_server.history import recorded
from tests.api_server.proxy import Call, Fault, FaultProxy
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.login import log_in

CALLS = 18
"""What the job below takes: a claim, a Service, 2 x 2 pods made, 2 deleted, 4 released, 1 Service pointed, 5 status."""

LIFE_SECONDS = 90.0


async def live(cluster: Cluster) -> None:
    """A gang of two that fails once and then finishes; each step follows as soon as the operator allows it."""
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    for attempt in range(2):
        pods = await cluster.gang_exists(attempt, seconds=LIFE_SECONDS)
        names = [pod["metadata"]["name"] for pod in pods]
        await cluster.runs(*names)
        await cluster.phase_is("Running", seconds=LIFE_SECONDS)
        if attempt == 0:
            await cluster.ends(names[1], code=1)
        else:
            await cluster.ends(*names)
    await cluster.phase_is("Succeeded", seconds=LIFE_SECONDS)

    async def released() -> bool:
        return not any(pod["metadata"].get("finalizers") for pod in await cluster.pods())

    await eventually_async(released, "no pod has a finalizer", LIFE_SECONDS)


async def outcome(cluster: Cluster) -> dict[str, Any]:
    """The end state without times, uids and addresses."""
    status = await cluster.status()
    pods = await cluster.pods()
    service = await cluster.service()
    return {
        "phase": status["phase"],
        "attempt": status["attempt"],
        "restarts": status["restarts"],
        "nodes": status["nodes"],
        "conditions": {item["type"]: item["status"] for item in status["conditions"]},
        "cause": (status["lastFailure"]["reason"], status["lastFailure"]["podName"]),
        "pods": {pod["metadata"]["name"]: pod["status"]["phase"] for pod in pods},
        "selected": service["spec"]["selector"]["training.ddpjob.io/attempt"],
    }


EXPECTED = {
    "phase": "Succeeded",
    "attempt": 1,
    "restarts": 1,
    "nodes": {"ready": 2, "spares": 0, "total": 2},
    "conditions": {"Running": "False", "Scheduled": "True", "Restarting": "False", "Complete": "True"},
    "pods": {"digits-1-0": "Succeeded", "digits-1-1": "Succeeded"},
    "selected": "1",
}


async def job_under(cluster: Cluster, proxy: FaultProxy) -> str:
    """Live it; what went wrong, or an empty string."""
    try:
        async with recorded(cluster) as history:
            await live(cluster)
            found = await outcome(cluster)
    except AssertionError as error:
        return str(error)[:2000]
    wrong = history.broken_rules()
    wrong += [f"{key}: {found.get(key)!r}, not {value!r}" for key, value in EXPECTED.items() if found.get(key) != value]
    calls = proxy.calls[cluster.namespace]
    if len(calls) > 3 * CALLS:
        wrong.append(f"{len(calls)} calls, where {CALLS} would do: {[call.kind for call in calls]}")
    return "; ".join(wrong)


@asynccontextmanager
async def proxy_before(cluster: Cluster, folder: Path, **options: Any) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(await log_in(), folder, **options) as proxy:
        yield proxy


async def test_the_fault_free_job_takes_the_calls_that_the_sweep_goes_through(
    new_cluster: NewCluster, start_operator: Any, tmp_path: Path, cluster: Cluster
) -> None:
    async with proxy_before(cluster, tmp_path) as proxy:
        await start_operator(proxy.kubeconfig)
        assert await job_under(cluster, proxy) == ""
        kinds = [call.kind for call in proxy.calls[cluster.namespace]]
    expected = {"POST services": 1, "POST persistentvolumeclaims": 1, "POST pods": 4, "DELETE pods": 2, "PATCH pods": 4}
    assert Counter(kinds) == expected | {"PATCH services": 1, "PATCH ddpjobs/status": 5}


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.CONFLICT, Fault.BROKEN, Fault.BUSY], ids=lambda fault: fault.name)
async def test_a_call_that_goes_wrong_changes_nothing_in_the_end(
    new_cluster: NewCluster, tmp_path: Path, fault: Fault
) -> None:
    clusters = await asyncio.gather(*(new_cluster() for _ in range(CALLS)))
    struck = {cluster.namespace: index for index, cluster in enumerate(clusters)}

    def strike(call: Call) -> Fault:
        return fault if call.index == struck[call.namespace] else Fault.PASS

    async with proxy_before(clusters[0], tmp_path, fault=strike) as proxy:
        namespaces = ",".join(struck)
        operator = await Operator(
            clusters[0].namespace, proxy.kubeconfig, tmp_path / "log", {"NAMESPACES": namespaces}
        ).start()
        try:
            await operator.ready()
            results = await asyncio.gather(*(job_under(cluster, proxy) for cluster in clusters))
        finally:
            await operator.kill()
        wrong = {proxy.calls[cluster.namespace][index].kind: result
                 for index, (cluster, result) in enumerate(zip(clusters, results, strict=True)) if result}  # fmt: skip
    assert wrong == {}


async def test_a_status_that_was_decided_on_an_older_job_is_refused_and_decided_again(
    cluster: Cluster, start_operator: Any, tmp_path: Path
) -> None:
    struck: list[int] = []

    def every_other_status(call: Call) -> Fault:
        strikes = call.kind == "PATCH ddpjobs/status" and (not struck or not struck[-1])
        if call.kind == "PATCH ddpjobs/status":
            struck.append(strikes)
        return Fault.OVERTAKEN if strikes else Fault.PASS

    async def annotate() -> None:
        path = f"{paths.jobs(cluster.namespace)}/digits"
        await cluster.client.merge_patch(path, "ddpjobs", {"metadata": {"annotations": {"seen": str(len(struck))}}})

    async with proxy_before(cluster, tmp_path, fault=every_other_status, overtake=annotate) as proxy:
        await start_operator(proxy.kubeconfig)
        assert await job_under(cluster, proxy) == ""
    codes = [entry.code for entry in await cluster.cost() if entry.resource == "ddpjobs/status"]
    assert codes == [409, 200] * 5


@pytest.mark.parametrize(
    ("fault", "struck"),
    [
        # before any later call the server is as it is after the one before that
        pytest.param(Fault.KILL_BEFORE, range(1), id="KILL_BEFORE"),
        pytest.param(Fault.KILL_AFTER, range(CALLS), id="KILL_AFTER"),
        pytest.param(Fault.TERM, range(1, CALLS, 4), id="TERM"),
    ],
)
async def test_an_operator_that_ends_at_any_call_is_followed_by_one_that_does_the_rest(
    new_cluster: NewCluster, tmp_path: Path, fault: Fault, struck: range
) -> None:
    at_once = asyncio.Semaphore(3)

    async def one(index: int) -> str:
        async with at_once:
            return await job_of_two_operators(await new_cluster(), fault, index, tmp_path / str(index))

    results = await asyncio.gather(*(one(index) for index in struck))
    assert {index: result for index, result in zip(struck, results, strict=True) if result} == {}


async def job_of_two_operators(cluster: Cluster, fault: Fault, index: int, folder: Path) -> str:
    folder.mkdir()  # noqa: ASYNC240

    def strike(call: Call) -> Fault:
        return fault if call.index == index else Fault.PASS

    async with proxy_before(cluster, folder, fault=strike) as proxy:
        operator = Operator(cluster.namespace, proxy.kubeconfig, folder / "log")
        proxy.kill = operator.kill
        proxy.terminate = lambda: operator.signal(signal.SIGTERM)
        await operator.start()

        async def start_again() -> int:
            assert operator.process is not None
            code = await operator.process.wait()
            await operator.start()
            return code

        supervisor = asyncio.create_task(start_again())
        try:
            await operator.ready()
            result = await job_under(cluster, proxy)
            if result:
                return result
            async with asyncio.timeout(LIFE_SECONDS):
                code = await supervisor
            expected = 0 if fault is Fault.TERM else -signal.SIGKILL
            return "" if code == expected else f"the first one ended with {code}, not {expected}"
        finally:
            supervisor.cancel()
            await operator.kill()
