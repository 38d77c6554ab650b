"""Many jobs on a real API server, and a kubelet that says what a test wants of their pods: for benchmark and soak."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
from tests.api_server.harness import REPOSITORY, Cluster, Operator

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in, open_session

Object = dict[str, Any]
RETRY_SECONDS = 0.2
RUNNING: Object = {
    "phase": "Running",
    "podIP": "127.94.0.2",
    "podIPs": [{"ip": "127.94.0.2"}],
    "conditions": [{"type": name, "status": "True"} for name in ("PodScheduled", "ContainersReady", "Ready")],
}


def ended(code: int) -> Object:
    state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
    container = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    return {"phase": "Failed" if code else "Succeeded", "conditions": [], "containerStatuses": [container]}


@dataclass(eq=False)
class Fleet:
    """Jobs and pods of a namespace as its watches report them, and a kubelet that runs each pod that is created."""

    cluster: Cluster
    jobs: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    """When each pod was first seen, on the event loop's clock."""
    reached: dict[tuple[str, str], float] = field(default_factory=dict)
    """The same of each job in each phase."""
    kubelet: Callable[[Object], Object | None] = lambda pod: RUNNING
    """The status that a new pod gets."""
    ended: str = ""
    """Why a watch ended, which nothing else would tell."""
    _awaited: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    """By pod: done when it runs."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _patches: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def loop_time(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 400) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    assert not self.ended, f"{self.ended}, while waiting until {what}"
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not within {seconds:g} s: {what}") from None

    def phase(self, name: str) -> str:
        return str((self.jobs.get(name, {}).get("status") or {}).get("phase"))

    async def until_each(self, names: Iterable[str], condition: Callable[[str], bool], what: str) -> None:
        """As `until`, of each name once: a look at all of them for each event would be quadratic."""
        waiting = list(names)

        def over() -> bool:
            while waiting and condition(waiting[-1]):
                waiting.pop()
            return not waiting

        await self.until(over, what)

    async def run(self, pods: list[str]) -> None:
        """Wait until these run, at no cost for each event: many may wait."""
        awaited = [self._awaited.setdefault(pod, asyncio.get_running_loop().create_future())
                   for pod in pods if not self._runs(pod)]  # fmt: skip
        await asyncio.gather(*awaited)

    def _runs(self, pod: str) -> bool:
        return pod in self.pods and self.pods[pod]["status"].get("phase") == "Running"

    def pods_of(self, job: str) -> dict[str, Object]:
        return {name: pod for name, pod in self.pods.items() if name.rpartition("-")[0].rpartition("-")[0] == job}

    async def report(self, pod: str, status: Object) -> None:
        path = f"{paths.pods(self.cluster.namespace)}/{pod}/status"
        while True:  # as a kubelet does, until the API server has an answer
            try:
                await self.cluster.client.merge_patch(path, "pods/status", {"status": status})
                return
            except ApiError as error:
                if 400 <= error.status < 500 and error.status != 429:  # it is gone
                    return
            await asyncio.sleep(RETRY_SECONDS)

    def watch_ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            self.ended = f"a watch ended: {watch.exception()!r}"
            self._news.set()

    def take(self, kind: str, type_: str, obj: Object) -> None:
        name = obj["metadata"]["name"]
        known = self.jobs if kind == "ddpjobs" else self.pods
        if type_ == "DELETED":
            known.pop(name, None)
        else:
            new = kind == "pods" and (name not in known or known[name]["metadata"]["uid"] != obj["metadata"]["uid"])
            known[name] = obj
            if kind == "ddpjobs":
                self.reached.setdefault((name, self.phase(name)), self.loop_time)
            if new:
                self.seen[name] = self.loop_time
                if (status := self.kubelet(obj)) is not None:
                    task = asyncio.create_task(self.report(name, status))
                    self._patches.add(task)
                    task.add_done_callback(self._patches.discard)
            if name in self._awaited and self._runs(name):
                self._awaited.pop(name).set_result(None)
        self._news.set()


@asynccontextmanager
async def fleet(cluster: Cluster) -> AsyncIterator[Fleet]:
    """What happens in the cluster's namespace from here on."""
    found, login = Fleet(cluster), await log_in()
    session = open_session(login)
    watches = []
    for kind, path in (("ddpjobs", paths.jobs(cluster.namespace)), ("pods", paths.pods(cluster.namespace))):
        _, since = await cluster.client.list(path, kind)
        watches.append(asyncio.create_task(_watch(session, login.server + path, kind, since, found)))
        watches[-1].add_done_callback(found.watch_ended)
    try:
        yield found
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await session.close()


async def _watch(session: aiohttp.ClientSession, url: str, kind: str, since: int, found: Fleet) -> None:
    while True:
        query = {"watch": "true", "resourceVersion": str(since)}
        with suppress(aiohttp.ClientError):
            async with session.get(url, params=query, timeout=aiohttp.ClientTimeout(total=None)) as stream:
                if stream.status == 429:  # the watch cache of this kind is not there yet (KEP-4568)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                assert stream.status == 200, await stream.text()
                buffer = b""
                async for chunk in stream.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        assert event["type"] != "ERROR", event
                        since = int(event["object"]["metadata"]["resourceVersion"])
                        found.take(kind, event["type"], event["object"])


@dataclass(eq=False)
class Health:
    """What the operator's event loop was held up by. All times are the longest ones, in seconds."""

    lag: float = 0.0
    """As the operator measures it itself: the upper bound of the bucket of its histogram."""
    longest: float = 0.0
    """An answer of its probe, which takes a few turns of the loop."""
    idle: float = 0.0
    """The same of a server beside it that does nothing."""
    unanswered: int = 0


@asynccontextmanager
async def probed(operator: Operator) -> AsyncIterator[Health]:
    """Ask its probe all the time until the end of the block, which then knows the answers (`prober`)."""
    assert operator.process is not None
    health, pipe, before = Health(), asyncio.subprocess.PIPE, await lags(operator)
    command = (sys.executable, "-m", "tests.api_server.prober", str(operator.probe_port), str(operator.process.pid))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=REPOSITORY)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield health
        found, _ = await process.communicate(b"")
        health.longest, health.idle, health.unanswered = json.loads(found).values()
        after = await lags(operator)
        health.lag = longest_lag({bound: after[bound] - before[bound] for bound in after})
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def lags(operator: Operator) -> dict[float, float]:
    """Timers of its event loop by the longest time that they were late."""
    page = await operator.metrics()
    found = re.findall(r'^ddpjob_operator_loop_lag_seconds_bucket{le="(.+?)"} (\S+)', page, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def longest_lag(timers: dict[float, float]) -> float:
    """The upper bound of the last bucket that has any, in seconds."""
    return min(bound for bound, count in timers.items() if count == timers[inf])


def peak_bytes(operator: Operator) -> int:
    """The most memory that it ever had."""
    assert operator.process is not None
    lines = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


async def requests_made(operator: Operator) -> dict[str, float]:
    """Requests by verb and resource since its start, without those of the Lease."""
    page = await operator.metrics()
    made: dict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if line.startswith("ddpjob_operator_api_requests_total{") and 'resource="leases"' not in line:
            labels = dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.index("}")].split(","))
            made[f"{labels['verb']} {labels['resource']}".replace('"', "")] += float(line.rsplit(" ", 1)[1])
    return dict(made)
