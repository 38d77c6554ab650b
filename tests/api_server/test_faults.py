"""Whatever goes wrong with any single call, the job ends as if nothing had.

As Sieve does (OSDI 2022): take the calls of a fault-free job, repeat that job once for each call and each kind of
fault, and compare the ends. The rules of `history` hold at every moment of every job.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.api_server.conftest import NewCluster
from tests.api_server.harness import Cluster, Object, Operator
from tests.api_server.history import Change, History, recorded
from tests.api_server.proxy import Call, Fault, FaultProxy
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.login import log_in

CALLS = 18
"""What the job below takes: a claim, a Service, 2 x 2 pods made, 2 deleted, 4 released, 1 Service pointed, 5 status."""

KINDS = (
    "POST services",
    "POST persistentvolumeclaims",
    "POST pods",
    "DELETE pods",
    "PATCH services",
    "PATCH ddpjobs/status",
)

LIFE_SECONDS = 120.0
STALE_SECONDS = 2.0
COLLECTIONS = {"ddpjobs": paths.jobs, "pods": paths.pods}


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
    await cluster.released(LIFE_SECONDS)


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


async def job_under(cluster: Cluster, proxy: FaultProxy, histories: dict[str, History] | None = None) -> str:
    """Live it; what went wrong, or an empty string. `histories` gets the record of it by namespace."""
    try:
        async with recorded(cluster) as history:
            if histories is not None:
                histories[cluster.namespace] = history
            await live(cluster)
            found = await outcome(cluster)
    except AssertionError as error:
        return str(error)[:2000]
    wrong = history.broken_rules() + history.made_again()
    if found["conditions"].get("Degraded") == "False":  # a busy API server has refused something for a moment
        del found["conditions"]["Degraded"]
    wrong += [f"{key}: {found.get(key)!r}, not {value!r}" for key, value in EXPECTED.items() if found.get(key) != value]
    if proxy.passed[cluster.namespace] > 3 * CALLS:
        kinds = [call.kind for call in proxy.calls[cluster.namespace]]
        wrong.append(f"{proxy.passed[cluster.namespace]} calls, where {CALLS} would do: {kinds}")
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


@asynccontextmanager
async def one_operator(clusters: list[Cluster], proxy: FaultProxy, folder: Path) -> AsyncIterator[Operator]:
    """One operator, behind the proxy, that serves all these namespaces."""
    namespaces = ",".join(cluster.namespace for cluster in clusters)
    operator = Operator(clusters[0].namespace, proxy.kubeconfig, folder / "log", {"NAMESPACES": namespaces})
    try:
        yield await (await operator.start()).ready()
    finally:
        await operator.kill()


@pytest.mark.fault(2, 3)
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.CONFLICT, Fault.BROKEN], ids=lambda fault: fault.name)
async def test_a_call_that_goes_wrong_changes_nothing_in_the_end(
    new_cluster: NewCluster, tmp_path: Path, fault: Fault
) -> None:
    clusters = await asyncio.gather(*(new_cluster() for _ in range(CALLS)))
    struck = {cluster.namespace: index for index, cluster in enumerate(clusters)}

    def strike(call: Call) -> Fault:
        return fault if call.index == struck[call.namespace] else Fault.PASS

    async with (
        proxy_before(clusters[0], tmp_path, fault=strike) as proxy,
        one_operator(clusters, proxy, tmp_path),
    ):
        results = await asyncio.gather(*(job_under(cluster, proxy) for cluster in clusters))
        wrong = {proxy.calls[cluster.namespace][index].kind: result
                 for index, (cluster, result) in enumerate(zip(clusters, results, strict=True)) if result}  # fmt: skip
    assert wrong == {}


@pytest.mark.fault(5, 7)
async def test_a_call_of_any_kind_that_gets_no_whole_answer_is_made_again(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    """A busy server, a connection that is reset before or within the answer, a server that hangs: each once for each
    kind of call."""
    faults = (Fault.BUSY, Fault.CUT, Fault.HALF, Fault.FROZEN)
    pairs = [(fault, kind) for fault in faults for kind in KINDS]
    clusters = await asyncio.gather(*(new_cluster() for _ in pairs))
    open_: dict[str, tuple[Fault, str]] = {
        cluster.namespace: pair for cluster, pair in zip(clusters, pairs, strict=True)
    }

    def strike(call: Call) -> Fault:
        if open_.get(call.namespace, (None, ""))[1] != call.kind:
            return Fault.PASS
        return open_.pop(call.namespace)[0]

    async with (
        proxy_before(clusters[0], tmp_path, fault=strike) as proxy,
        one_operator(clusters, proxy, tmp_path),
    ):
        results = await asyncio.gather(*(job_under(cluster, proxy) for cluster in clusters))
    assert {pair: result for pair, result in zip(pairs, results, strict=True) if result} == {}
    assert open_ == {}, "every fault has struck"


@pytest.mark.fault(3)
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


@pytest.mark.fault(1)
@pytest.mark.parametrize("stale", ["", "ddpjobs", "pods"], ids=["true lists", "an old job", "old pods"])
async def test_an_operator_killed_at_any_call_is_followed_by_one_that_does_the_rest(
    new_cluster: NewCluster, tmp_path: Path, stale: str
) -> None:
    """Every namespace has its last call, and none after it arrives. When all have come to theirs, the operator is
    killed: for the API server, it died right after that call, or before its first one. The next one may be served by an
    API server whose objects of one kind are, for a while, as they were before their last change."""
    clusters = await asyncio.gather(*(new_cluster() for _ in range(-1, CALLS)))
    last = {cluster.namespace: index for index, cluster in enumerate(clusters, start=-1)}
    histories: dict[str, History] = {}
    old: dict[str, dict[str, Any]] = {}

    def strike(call: Call) -> Fault:
        return Fault.CUT if call.index > last.get(call.namespace, call.index) else Fault.PASS

    async def served(request: web.Request) -> web.StreamResponse | None:
        lists = request.method == "GET" and "watch" not in request.query and request.path in old
        return web.json_response(old[request.path]) if lists else None

    async def all_at_their_last_call() -> bool:
        """Or at its end: a job whose calls come in another order may take one less."""
        return all(
            job.done() or (proxy.passed[name] > index and len(proxy.calls.get(name, ())) > max(index, 0))
            for job, (name, index) in zip(jobs, last.items(), strict=True)
        )

    async with proxy_before(clusters[0], tmp_path, fault=strike, read_fault=served) as proxy:
        proxy.freeze = lambda request: request.path in old
        async with one_operator(clusters, proxy, tmp_path) as first:
            jobs = [asyncio.create_task(job_under(cluster, proxy, histories)) for cluster in clusters]
            await eventually_async(
                all_at_their_last_call, "every job has come to its last call", LIFE_SECONDS, lambda: proxy.calls
            )
            await first.kill()
        if stale:
            old |= {COLLECTIONS[stale](name): a_change_ago(history, stale) for name, history in histories.items()}
        last.clear()
        async with one_operator(clusters, proxy, tmp_path):
            await asyncio.sleep(STALE_SECONDS if stale else 0)
            old.clear()
            results = await asyncio.gather(*jobs)
    assert {index: result for index, result in enumerate(results, start=-1) if result} == {}


def a_change_ago(history: History, kind: str) -> dict[str, Any]:
    """The list that a server gives which lacks the last change."""
    return listed([change for change in history.changes if change.kind == kind][:-1])


def listed(changes: list[Change]) -> dict[str, Any]:
    """The list that a server gives which knows of these changes only."""
    objects: dict[str, dict[str, Any]] = {}
    version = "1"
    for change in changes:
        version = change.object["metadata"]["resourceVersion"]
        objects.pop(change.object["metadata"]["uid"], None)
        if change.type != "DELETED":
            objects[change.object["metadata"]["uid"]] = change.object
    return {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version},
            "items": list(objects.values())}  # fmt: skip


async def restarted(cluster: Cluster) -> Callable[[Object], bool]:
    """The second attempt starts. Who sees the first one start would delete these pods and make those again."""
    await cluster.apply_job(restart={"backoff": {"initialSeconds": 0}})
    names = [pod["metadata"]["name"] for pod in await cluster.gang_exists(seconds=LIFE_SECONDS)]
    await cluster.runs(*names)
    await cluster.phase_is("Running", seconds=LIFE_SECONDS)
    await cluster.ends(names[1], code=1)
    await only(cluster, "digits-1-0", "digits-1-1")
    return lambda job: bool(job["status"]["phase"] == "Starting")


async def resumed(cluster: Cluster) -> Callable[[Object], bool]:
    """The first attempt starts. Who sees the suspension before it would delete the pods."""
    await cluster.apply_job(suspend=True)
    await cluster.phase_is("Suspended", seconds=LIFE_SECONDS)
    await cluster.edit_job(suspend=False)
    await only(cluster, "digits-0-0", "digits-0-1")
    return lambda job: bool(job["spec"]["suspend"])


async def tried_again(cluster: Cluster) -> Callable[[Object], bool]:
    """Data is fetched for the second time. Who knows of no failure would delete that pod and make the first again."""
    no_wait = {"backoff": {"initialSeconds": 0, "maxSeconds": 0}}
    await cluster.apply_job(initializers=[{"name": "data", "script": "true", "path": "data"}], restart=no_wait)
    await only(cluster, "digits-init-0")
    await cluster.runs("digits-init-0")
    await cluster.ends("digits-init-0", code=1)
    await only(cluster, "digits-init-1")
    return lambda job: not job["status"].get("initializerFailures")


async def only(cluster: Cluster, *names: str) -> None:
    async def there() -> bool:
        return [pod["metadata"]["name"] for pod in await cluster.pods()] == list(names)

    await eventually_async(there, f"the pods are {names}", LIFE_SECONDS)


@pytest.mark.fault(3)
async def test_an_operator_with_an_old_picture_of_a_job_reads_it_before_it_touches_its_pods(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    """Lists and watches of jobs are those of a server that lags behind what the last operator wrote, and the pods are
    as they are."""
    stories = (restarted, resumed, tried_again)
    clusters = await asyncio.gather(*(new_cluster() for _ in stories))
    old: dict[str, Object] = {}
    read: set[str] = set()

    async def served(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith("/ddpjobs/digits"):
            read.add(request.path)
        lists = "watch" not in request.query and request.path in old
        return web.json_response(old[request.path]) if lists else None

    async def live(cluster: Cluster, story: Callable[[Cluster], Awaitable[Callable[[Object], bool]]]) -> None:
        async with recorded(cluster) as history:
            is_old = await story(cluster)
        jobs = [change for change in history.changes if change.kind == "ddpjobs"]
        newest = max(n for n, change in enumerate(jobs) if change.object.get("status") and is_old(change.object))
        assert newest + 1 < len(jobs)
        old[paths.jobs(cluster.namespace)] = listed(jobs[: newest + 1])

    async with proxy_before(clusters[0], tmp_path, read_fault=served) as proxy:

        def touched() -> dict[str, list[str]]:
            return {name: kinds for name, calls in proxy.calls.items()
                    if (kinds := [call.kind for call in calls if call.kind.endswith(" pods")])}  # fmt: skip

        async def read_or_touched() -> bool:
            return len(read) == len(stories) or bool(touched())

        async with one_operator(clusters, proxy, tmp_path) as first:
            await asyncio.gather(*map(live, clusters, stories))
            await first.kill()
        proxy.freeze = lambda request: request.path in old
        proxy.calls.clear()
        read.clear()
        async with one_operator(clusters, proxy, tmp_path):
            await eventually_async(read_or_touched, "every job is read", LIFE_SECONDS)
            assert touched() == {}


async def test_an_operator_that_is_told_to_stop_within_a_call_is_followed_by_one_that_does_the_rest(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    struck = range(1, CALLS, 4)
    results = await asyncio.gather(
        *[told_to_stop(await new_cluster(), index, tmp_path / str(index)) for index in struck]
    )
    assert {index: result for index, result in zip(struck, results, strict=True) if result} == {}


async def told_to_stop(cluster: Cluster, index: int, folder: Path) -> str:
    folder.mkdir()  # noqa: ASYNC240

    def strike(call: Call) -> Fault:
        return Fault.TERM if call.index == index else Fault.PASS

    async with proxy_before(cluster, folder, fault=strike) as proxy:
        operator = Operator(cluster.namespace, proxy.kubeconfig, folder / "log")
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
            return "" if code == 0 else f"the first one ended with {code}"
        finally:
            supervisor.cancel()
            await operator.kill()
