"""The sweep: one job that fails once, repeated with one fault at one of its calls, and what is wrong with it then.

As Sieve does (OSDI 2022): take the calls of a fault-free job, repeat that job once for each call and each kind of
fault, and compare the ends. The rules of `history` hold at every moment of every job. `test_faults` goes through all of
it with the operator as it is, `test_seeded_bugs` through parts of it with operators that have a bug each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.api_server.conftest import NewCluster
from tests.api_server.harness import OPERATOR, Cluster, Object, Operator
from tests.api_server.history import Change, History, recorded
from tests.api_server.proxy import Call, Fault, FaultProxy
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.login import log_in

CALLS = 18
"""What the job below takes: a claim, a Service, 2 x 2 pods made, 2 deleted, 4 released, 1 Service pointed, 5 status."""

LIFE_SECONDS = 300.0
"""On a busy machine. A job that is killed before its first call waits until all others have come to their last."""
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


@asynccontextmanager
async def one_operator(
    clusters: list[Cluster], proxy: FaultProxy, folder: Path, command: tuple[str, ...] = OPERATOR
) -> AsyncIterator[Operator]:
    """One operator, behind the proxy, that serves all these namespaces."""
    served = {"NAMESPACES": ",".join(cluster.namespace for cluster in clusters)}
    operator = Operator(clusters[0].namespace, proxy.kubeconfig, folder / "log", served, command, forked=True)
    try:
        yield await (await operator.start()).ready()
    finally:
        await operator.kill()


async def struck_once(
    new_cluster: NewCluster, folder: Path, fault: Fault, calls: Sequence[int], command: tuple[str, ...] = OPERATOR
) -> dict[tuple[int, str], str]:
    """What is wrong with a job whose call of that number met with the fault, for each of these numbers; -1 is none.

    Keyed by the number and the kind of the call.
    """
    clusters = dict(zip(calls, await asyncio.gather(*(new_cluster() for _ in calls)), strict=True))
    struck = {cluster.namespace: number for number, cluster in clusters.items()}

    def strike(call: Call) -> Fault:
        return fault if call.index == struck[call.namespace] else Fault.PASS

    served = list(clusters.values())
    async with (
        proxy_before(served[0], folder, fault=strike) as proxy,
        one_operator(served, proxy, folder, command),
    ):
        results = await asyncio.gather(*(job_under(cluster, proxy) for cluster in served))
    kinds = {number: ["", *(call.kind for call in proxy.calls[cluster.namespace])][number + 1]
             for number, cluster in clusters.items()}  # fmt: skip
    return {(number, kinds[number]): result for number, result in zip(clusters, results, strict=True)}


async def killed_after(
    new_cluster: NewCluster, folder: Path, calls: Sequence[int], stale: str = "", command: tuple[str, ...] = OPERATOR
) -> dict[int, str]:
    """What is wrong with a job whose call of that number was the last one of its operator, for each of these numbers.

    Every namespace has its last call, and none after it arrives. When all have come to theirs, the operator is
    killed: for the API server, it died right after that call, or (-1) before its first one. The next one may be served
    by an API server whose objects of one kind (`stale`) are, for a while, as they were before their last change.
    """
    clusters = await asyncio.gather(*(new_cluster() for _ in calls))
    last = {cluster.namespace: number for number, cluster in zip(calls, clusters, strict=True)}
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
            job.done() or (proxy.passed[name] > number and len(proxy.calls.get(name, ())) > max(number, 0))
            for job, (name, number) in zip(jobs, last.items(), strict=True)
        )

    async with proxy_before(clusters[0], folder, fault=strike, read_fault=served) as proxy:
        proxy.freeze = lambda request: request.path in old
        async with one_operator(clusters, proxy, folder, command) as first:
            jobs = [asyncio.create_task(job_under(cluster, proxy, histories)) for cluster in clusters]
            await eventually_async(
                all_at_their_last_call, "every job has come to its last call", LIFE_SECONDS, lambda: proxy.calls
            )
            await first.kill()
        if stale:
            old |= {COLLECTIONS[stale](name): a_change_ago(history, stale) for name, history in histories.items()}
        last.clear()
        async with one_operator(clusters, proxy, folder, command):
            await asyncio.sleep(STALE_SECONDS if stale else 0)
            old.clear()
            results = await asyncio.gather(*jobs)
    return dict(zip(calls, results, strict=True))


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


Story = Callable[[Cluster], Awaitable[Callable[[Object], bool]]]


@dataclass(eq=False)
class OldPicture:
    """What the next operator does that sees each job as it once was."""

    proxy: FaultProxy
    histories: list[History]
    read: set[str] = field(default_factory=set)
    """Paths of jobs that it has read."""

    @property
    def touched(self) -> dict[str, list[str]]:
        """By namespace, its calls that change pods."""
        return {name: kinds for name, calls in self.proxy.calls.items()
                if (kinds := [call.kind for call in calls if call.kind.endswith(" pods")])}  # fmt: skip


@asynccontextmanager
async def old_picture(
    new_cluster: NewCluster, folder: Path, stories: Sequence[Story], command: tuple[str, ...] = OPERATOR
) -> AsyncIterator[OldPicture]:
    """Each story has gone on under one operator, and the next one has begun. Lists and watches of jobs are those of a
    server that lags behind what the last one wrote, and the pods are as they are."""
    clusters = await asyncio.gather(*(new_cluster() for _ in stories))
    old: dict[str, Object] = {}

    async def served(request: web.Request) -> web.StreamResponse | None:
        if request.path.endswith("/ddpjobs/digits"):
            seen.read.add(request.path)
        lists = "watch" not in request.query and request.path in old
        return web.json_response(old[request.path]) if lists else None

    async def tell(cluster: Cluster, story: Story, history: History) -> None:
        is_old = await story(cluster)
        jobs = [change for change in history.changes if change.kind == "ddpjobs"]
        newest = max(n for n, change in enumerate(jobs) if change.object.get("status") and is_old(change.object))
        assert newest + 1 < len(jobs)
        old[paths.jobs(cluster.namespace)] = listed(jobs[: newest + 1])

    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxy_before(clusters[0], folder, read_fault=served))
        seen = OldPicture(proxy, [await stack.enter_async_context(recorded(cluster)) for cluster in clusters])
        async with one_operator(clusters, proxy, folder, command) as first:
            await asyncio.gather(*map(tell, clusters, stories, seen.histories))
            await first.kill()
        proxy.freeze = lambda request: request.path in old
        proxy.calls.clear()
        seen.read.clear()
        await stack.enter_async_context(one_operator(clusters, proxy, folder, command))
        yield seen
