"""What the operator costs and how far it goes: on a real API server, beside a loop that makes the same requests.

    python -m tests.api_server.bench_operator [--jobs 1000] [--nodes 8]

No kubelet runs: one here patches each new pod to Running. The bare loop makes the requests that the operator makes,
with the bodies that the operator sends, and decides nothing: it has no watch of its own, no cache and no queue. Its
pods are patched in the same way. Latencies and rates are of this machine; ratios, requests and memory are of the
program.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.api_server.fleet import Fleet, Health, Object, ended, fleet, peak_bytes, probed, requests_made
from tests.api_server.harness import Cluster, Operator
from tests.api_server.server import ApiServer, api_server_running, as_kubeconfig
from tests.kubernetes import Impossible

from ddpjob_operator.cluster import paths

IN_FLIGHT = 32
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    jobs: int = 1000
    nodes: int = 8
    """Pods of each job."""
    rounds: int = 20
    """Jobs that are alone."""
    bursts: int = 3
    """Of `few` jobs each. One takes six seconds, in which the speed of the machine counts for 10 %."""
    most_failures: int = 200
    resync_seconds: float = 15.0

    @property
    def few(self) -> int:
        """Jobs for the rate that all of them are compared with."""
        return max(1, self.jobs // 10)

    @property
    def most_memory(self) -> int:
        """MiB that the operator may take."""
        return 200 if self.jobs * self.nodes <= 8_000 else 350


@dataclass
class Row:
    """One figure and what it must be."""

    what: str
    value: float
    unit: str
    target: float | None = None
    least: bool = False
    """Whether the target is the least, and not the most, that it may be."""

    @property
    def met(self) -> bool:
        return self.target is None or (self.value >= self.target if self.least else self.value <= self.target)


@dataclass
class Bench:
    """The figures so far; each is said as soon as it is there."""

    console: Console
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, target: float | None = None, *, least: bool = False) -> None:
        self.rows.append(Row(what, value, unit, target, least))
        self.console.print(f"{what}: {value:.4g} {unit}", markup=False)

    def probe(self, when: str, health: Health) -> None:
        """What its event loop is held up by; an idle server is held up by the machine alone."""
        self.add(f"longest answer of an idle server {when}", health.idle * 1000, "ms")
        limit = 100 + health.idle * 1000
        self.add(f"longest lag of the event loop {when}", health.lag * 1000, "ms", limit)
        self.add(f"longest answer of the probe {when}", health.longest * 1000, "ms", limit)


@asynccontextmanager
async def namespace(server: ApiServer) -> AsyncIterator[Cluster]:
    with as_kubeconfig(server.kubeconfig):
        cluster = await Cluster.connect(server.kubeconfig, f"bench-{secrets.token_hex(4)}")
        try:
            await cluster.create_namespace()
            yield cluster
        finally:
            await cluster.delete_namespace()
            await cluster.client.close()


@asynccontextmanager
async def operating(cluster: Cluster, folder: Path, **environment: str) -> AsyncIterator[Operator]:
    given = {"LOG_LEVEL": "INFO", "REQUESTS": str(IN_FLIGHT)} | environment
    operator = await Operator(cluster.namespace, cluster.kubeconfig, folder / "operator.log", given).start()
    try:
        yield await operator.ready(300)
    finally:
        await operator.kill()


@dataclass(frozen=True)
class Bodies:
    """What the operator sends for a job, taken from one that it has started. What the server adds is left out."""

    service: Object
    claim: Object
    pod: Object
    status: Object

    def named(self, kind: str, name: str) -> Object:
        body: Object = copy.deepcopy(getattr(self, kind))
        body["metadata"]["name"] = name
        return body


def _as_sent(obj: Object) -> Object:
    meta = obj["metadata"]
    spec = {name: value for name, value in obj["spec"].items() if name not in ("clusterIP", "clusterIPs")}
    kept = {name: meta[name] for name in ("labels", "annotations") if name in meta}
    return {"apiVersion": "v1", "kind": obj["kind"], "metadata": kept, "spec": spec}


async def bodies_of(cluster: Cluster, seen: Fleet) -> Bodies:
    """Of a job that the operator starts for this."""
    await cluster.apply_job("model")
    await seen.until(lambda: seen.phase("model") == "Running", "it runs")
    claim = await cluster.client.get(f"{paths.claims(cluster.namespace)}/model-shared", "persistentvolumeclaims")
    pod = seen.pods["model-0-0"] | {"kind": "Pod"}
    found = Bodies(
        _as_sent(await cluster.service("model-rdzv") | {"kind": "Service"}),
        _as_sent(claim | {"kind": "PersistentVolumeClaim"}),
        _as_sent(pod),
        seen.jobs["model"]["status"],
    )
    await cluster.delete_job("model")
    return found


class Bare:
    """The operator's requests for a job, one after the other where it waits for an answer."""

    def __init__(self, cluster: Cluster, bodies: Bodies) -> None:
        self._cluster, self._bodies, self._limit = cluster, bodies, asyncio.Semaphore(IN_FLIGHT)

    async def apply(self, name: str) -> None:
        """The job itself, which the operator leaves to another controller."""
        async with self._limit:
            await self._cluster.apply_job(name, managedBy="example.com/bare")

    async def start(self, name: str, nodes: int, attempt: int = 0) -> None:
        if attempt == 0:
            await asyncio.gather(
                self._create(paths.services(self._cluster.namespace), "services", "service", f"{name}-rdzv"),
                self._create(
                    paths.claims(self._cluster.namespace), "persistentvolumeclaims", "claim", f"{name}-shared"
                ),
            )
        await self.write(name, attempt)
        pods, names = paths.pods(self._cluster.namespace), [f"{name}-{attempt}-{rank}" for rank in range(nodes)]
        await asyncio.gather(*(self._create(pods, "pods", "pod", pod) for pod in names))

    async def restart(self, name: str, nodes: int) -> None:
        """As the operator does it: the status, the Service's attempt, then old pods go while new ones come."""
        body = {"spec": {"selector": self._bodies.service["spec"]["selector"] | {"attempt": "1"}}}
        await self.write(name, 1)
        async with self._limit:
            path = f"{paths.services(self._cluster.namespace)}/{name}-rdzv"
            await self._cluster.client.merge_patch(path, "services", body)
        gone = (self._delete(f"{name}-0-{rank}") for rank in range(nodes))
        made = (self._create(paths.pods(self._cluster.namespace), "pods", "pod", f"{name}-1-{rank}")
                for rank in range(nodes))  # fmt: skip
        await asyncio.gather(*gone, *made)

    async def write(self, name: str, attempt: int) -> None:
        """The status."""
        async with self._limit:
            path = f"{paths.jobs(self._cluster.namespace)}/{name}/status"
            body = {"status": self._bodies.status | {"attempt": attempt}}
            await self._cluster.client.merge_patch(path, "ddpjobs/status", body)

    async def _create(self, path: str, resource: str, kind: str, name: str) -> None:
        async with self._limit:
            await self._cluster.client.create(path, resource, self._bodies.named(kind, name))

    async def _delete(self, pod: str) -> None:
        async with self._limit:
            await self._cluster.client.delete(f"{paths.pods(self._cluster.namespace)}/{pod}", "pods")


def has_ended(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Failed")


async def bare_latencies(cluster: Cluster, seen: Fleet, bodies: Bodies, rounds: int) -> tuple[float, float]:
    """Medians in seconds of what `latencies` measures, without an operator's part."""
    start, restart, bare = [], [], Bare(cluster, bodies)
    for number in range(rounds):
        name = f"hand{number}"
        began = seen.loop_time
        await bare.apply(name)
        await seen.until(lambda name=name: name in seen.jobs, "the watch has the job")
        await bare.start(name, 2)
        await seen.until(lambda name=name: len(seen.pods_of(name)) == 2, "the pods exist")
        start.append(max(seen.seen[pod] for pod in seen.pods_of(name)) - began)
        await seen.run([f"{name}-0-0", f"{name}-0-1"])  # else its kubelet may say that it runs after its end
        began = seen.loop_time
        await seen.report(f"{name}-0-1", ended(137))
        await seen.until(lambda name=name: has_ended(seen.pods[f"{name}-0-1"]), "the watch has its end")
        await bare.restart(name, 2)
        new = {f"{name}-1-0", f"{name}-1-1"}
        await seen.until(lambda new=new: new <= seen.pods.keys(), "the pods of the next attempt exist")
        restart.append(max(seen.seen[pod] for pod in new) - began)
        await cluster.delete_job(name)
    return statistics.median(start), statistics.median(restart)


async def latencies(cluster: Cluster, seen: Fleet, bodies: Bodies, rounds: int, bench: Bench) -> None:
    """One job at a time: from its creation to its last pod, and from a failure to the last pod after it."""
    start, restart = [], []
    for number in range(rounds):
        name = f"one{number}"
        began = seen.loop_time
        await cluster.apply_job(name, restart={"backoff": {"initialSeconds": 0}})
        await seen.until(lambda name=name: len(seen.pods_of(name)) == 2, "the pods exist")
        start.append(max(seen.seen[pod] for pod in seen.pods_of(name)) - began)
        await seen.until(lambda name=name: seen.phase(name) == "Running", "it runs")
        began = seen.loop_time
        await seen.report(f"{name}-0-1", ended(137))
        new = {f"{name}-1-0", f"{name}-1-1"}
        await seen.until(lambda new=new: new <= seen.pods.keys(), "the pods of the next attempt exist")
        restart.append(max(seen.seen[pod] for pod in new) - began)
        await cluster.delete_job(name)
    began, failed = await bare_latencies(cluster, seen, bodies, rounds)
    bench.add("the requests of a start alone, median", began * 1000, "ms")
    bench.add("apply → last pod, median", statistics.median(start) * 1000, "ms")
    bench.add("  of these requests alone", statistics.median(start) / began, "ratio", 2.0)
    bench.add("the requests of a restart alone, median", failed * 1000, "ms")
    bench.add("failure → last pod of the next attempt, median", statistics.median(restart) * 1000, "ms")
    bench.add("  of these requests alone", statistics.median(restart) / failed, "ratio", 2.0)


async def bare_rate(cluster: Cluster, seen: Fleet, bodies: Bodies, prefix: str, jobs: int, nodes: int) -> float:
    """Jobs a second of the loop without an operator."""
    bare, began = Bare(cluster, bodies), seen.loop_time

    async def one(name: str) -> None:
        await bare.apply(name)
        await bare.start(name, nodes)
        await seen.run([f"{name}-0-{rank}" for rank in range(nodes)])
        await bare.write(name, 0)

    await asyncio.gather(*(one(f"{prefix}{number}") for number in range(jobs)))
    return jobs / (seen.loop_time - began)


async def many(cluster: Cluster, seen: Fleet, prefix: str, jobs: int, nodes: int) -> float:
    """Jobs a second that the operator brings from their creation to Running."""
    names = [f"{prefix}{number}" for number in range(jobs)]
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def apply(name: str) -> None:
        async with limit:
            await cluster.apply_job(name, nodes=nodes, restart={"backoff": {"initialSeconds": 0}})

    began = seen.loop_time
    await asyncio.gather(*(apply(name) for name in names))
    await seen.until_each(names, lambda name: seen.phase(name) == "Running", f"{jobs} jobs run")
    return jobs / (seen.loop_time - began)


async def measure(server: ApiServer, sizes: Sizes, folder: Path, bench: Bench) -> None:
    jobs, nodes, few = sizes.jobs, sizes.nodes, sizes.few
    async with namespace(server) as cluster, fleet(cluster) as seen:
        async with operating(cluster, folder):
            bodies = await bodies_of(cluster, seen)
        rates = [await bare_rate(cluster, seen, bodies, f"bare{n}-", few, nodes) for n in range(sizes.bursts)]
        rate_of_loop = statistics.median(rates)
        bench.add(f"bare loop, {few} jobs × {nodes} pods", rate_of_loop, "jobs/s")
    async with namespace(server) as cluster, fleet(cluster) as seen:
        async with operating(cluster, folder) as operator:
            bench.add("memory of an idle operator", operator.resident_bytes() / MIB, "MiB")
            await latencies(cluster, seen, bodies, sizes.rounds, bench)
            # both sizes while the probe is asked all the time, which takes its share of the two cores
            async with probed(operator) as health:
                made = sum((await requests_made(operator)).values())
                rates = [await many(cluster, seen, f"few{n}-", few, nodes) for n in range(sizes.bursts)]
                few_rate = statistics.median(rates)
                bench.add(f"{few} jobs × {nodes} pods to Running", few_rate, "jobs/s")
                bench.add("  of the bare loop", few_rate / rate_of_loop, "ratio", 0.45, least=True)
                made = sum((await requests_made(operator)).values()) - made
                bench.add("  requests a job, events included", made / (sizes.bursts * few), "requests")
                rate = await many(cluster, seen, "many", jobs - sizes.bursts * few, nodes)
                bench.add(f"{jobs} jobs × {nodes} pods to Running", rate, "jobs/s")
                bench.add(f"  of the rate of {few}", rate / few_rate, "ratio", 0.85, least=True)
                hit = [name for name in seen.jobs if name.startswith("many")][: sizes.most_failures]
                began = seen.loop_time
                await asyncio.gather(*(seen.report(f"{name}-0-1", ended(137)) for name in hit))
                new = {f"{name}-1-{rank}" for name in hit for rank in range(nodes)}
                await seen.until_each(new, lambda pod: pod in seen.pods, "all of them have their new pods")
                bench.add(f"{len(hit)} failures at once → all new pods", seen.loop_time - began, "s")
            bench.probe("under this load", health)
            bench.add("peak memory", peak_bytes(operator) / MIB, "MiB", sizes.most_memory)
        began = seen.loop_time
        async with operating(cluster, folder, RESYNC_SECONDS=str(sizes.resync_seconds)) as operator:
            bench.add("start with all of them there → ready", seen.loop_time - began, "s", 10)
            async with probed(operator) as health:
                await asyncio.sleep(2.3 * sizes.resync_seconds)
            bench.probe("in two resyncs", health)
            bench.add("peak memory after a start", peak_bytes(operator) / MIB, "MiB", sizes.most_memory)


def report(rows: list[Row]) -> int:
    table = Table(title="the operator on a real API server")
    for column in ("", "figure", "", "target"):
        table.add_column(column, justify="right" if column in ("figure", "target") else "left")
    for row in rows:
        target = (
            "" if row.target is None else f"{'≥' if row.least else '≤'} {row.target:g}{'' if row.met else '  MISSED'}"
        )
        table.add_row(row.what, f"{row.value:.4g}", row.unit, target)
    Console(width=110).print(table)
    return 0 if all(row.met for row in rows) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.api_server.bench_operator", description=__doc__)
    parser.add_argument("--jobs", type=int, default=Sizes.jobs)
    parser.add_argument("--nodes", type=int, default=Sizes.nodes)
    given = parser.parse_args()
    bench = Bench(Console(stderr=True))
    try:
        with api_server_running() as server, tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(server, Sizes(given.jobs, given.nodes), Path(folder), bench))
    except Impossible as missing:
        raise SystemExit(str(missing)) from None
    finally:
        code = report(bench.rows)
    return code


if __name__ == "__main__":
    sys.exit(main())
