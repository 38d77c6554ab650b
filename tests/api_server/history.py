"""Everything that happened to the jobs and pods of a namespace, and the rules that must hold over all of it.

A look at the end misses what was wrong only for a moment, so a watch records every version of every object. In the end
etcd's own history shows that the watch has missed none, and in which order jobs and pods changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
from tests.api_server.harness import Cluster
from tests.support.etcd import Etcd
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.login import log_in, open_session

UID = "training.ddpjob.io/uid"
ATTEMPT = "training.ddpjob.io/attempt"
NODE_RANK = "training.ddpjob.io/node-rank"

WAITS = "none"
"""The node rank of a pod that has none, and waits for one."""

RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Change:
    """One watch event: `type` is ADDED, MODIFIED or DELETED."""

    kind: str
    type: str
    object: dict[str, Any]


@dataclass(eq=False)
class History:
    """What has been recorded so far, oldest first for each kind; after the block oldest first for all of it."""

    changes: list[Change] = field(default_factory=list)

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [change.object.get("status") or {} for change in self.changes if change.kind == "ddpjobs"]

    def broken_rules(self) -> list[str]:
        return [*self._two_pods_of_one_node(), *self._untrue_steps(), *self._pods_before_their_attempt()]

    def made_again(self) -> list[str]:
        """Node ranks of an attempt for which a second pod was made. Right only where somebody deletes pods."""
        made: dict[tuple[str, ...], set[str]] = {}
        for change in self.changes:
            labels = change.object["metadata"].get("labels") or {}
            if change.kind == "pods" and change.type == "ADDED" and labels.get(NODE_RANK, WAITS) != WAITS:
                node = (labels[UID], labels[ATTEMPT], labels[NODE_RANK])
                made.setdefault(node, set()).add(change.object["metadata"]["uid"])
        return [f"attempt {attempt}, node rank {rank} had {len(uids)} pods"
                for (_, attempt, rank), uids in made.items() if len(uids) > 1]  # fmt: skip

    def _two_pods_of_one_node(self) -> list[str]:
        """Live pods, by what their labels say at the time. One that waits (node rank none) is no node."""
        live: dict[str, tuple[str, ...]] = {}
        wrong = []
        for change in self.changes:
            labels, uid = change.object["metadata"].get("labels") or {}, change.object["metadata"]["uid"]
            if change.kind != "pods" or UID not in labels:
                continue
            ended = (change.object.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            live.pop(uid, None)
            if change.type == "DELETED" or ended or labels[NODE_RANK] == WAITS:
                continue
            node = (labels[UID], labels[ATTEMPT], labels[NODE_RANK])
            if node in live.values():
                wrong.append(f"attempt {node[1]}, node rank {node[2]} had two pods at once")
            live[uid] = node
        return wrong

    def _untrue_steps(self) -> list[str]:
        wrong = []
        statuses = self.statuses
        for before, after in pairwise(statuses):
            attempts, restarts = (after.get(key, 0) - before.get(key, 0) for key in ("attempt", "restarts"))
            if attempts not in (0, 1) or restarts not in (0, attempts):
                wrong.append(f"attempt {before.get('attempt', 0)} -> {after.get('attempt', 0)}, "
                             f"restarts {before.get('restarts', 0)} -> {after.get('restarts', 0)}")  # fmt: skip
            if before.get("phase") in ("Succeeded", "Failed") and after.get("phase") != before["phase"]:
                wrong.append(f"the phase went from {before['phase']} to {after.get('phase')}")
        return wrong

    def _pods_before_their_attempt(self) -> list[str]:
        """A pod of an attempt above 0 whose attempt was not on record when it was made for it, or assigned to it."""
        recorded = {int(status.get("attempt", 0)): int(change.object["metadata"]["resourceVersion"])
                    for change in reversed(self.changes) if change.kind == "ddpjobs"
                    for status in [change.object.get("status") or {}]}  # fmt: skip
        wrong, known = [], set()
        for change in self.changes:
            meta = change.object["metadata"]
            attempt = int((meta.get("labels") or {}).get(ATTEMPT, 0))
            if change.kind != "pods" or attempt == 0 or (meta["uid"], attempt) in known:
                continue
            known.add((meta["uid"], attempt))
            made = int(meta["resourceVersion"])
            if recorded.get(attempt, made) >= made:
                wrong.append(f"{meta['name']} was in attempt {attempt} before that attempt was on record")
        return wrong


@asynccontextmanager
async def recorded(cluster: Cluster) -> AsyncIterator[History]:
    """Record from here to the end of the block, and all that a test has seen by then."""
    history = History()
    login = await log_in()
    session = open_session(login)
    places = {"ddpjobs": paths.jobs(cluster.namespace), "pods": paths.pods(cluster.namespace)}
    watches = []
    since: dict[str, int] = {}
    for kind, path in places.items():
        _, since[kind] = await cluster.client.list(path, kind)
        begun = asyncio.Event()
        watches.append(asyncio.create_task(_watch(session, login.server + path, kind, since[kind], history, begun)))
        await begun.wait()
    try:
        yield history
        await _caught_up(cluster, history, since)
    finally:
        for watch in watches:
            watch.cancel()
        ended = await asyncio.gather(*watches, return_exceptions=True)
        await session.close()
    missed = [error for error in ended if isinstance(error, Exception)]
    assert missed == [], "there are changes that are not on record"
    history.changes.sort(key=lambda change: int(change.object["metadata"]["resourceVersion"]))
    if etcd := Etcd.beside(cluster.kubeconfig):
        record = [(change.kind, change.object) for change in history.changes]
        wrong = await asyncio.to_thread(etcd.differences, cluster.namespace, record, min(since.values()) + 1)
        assert wrong == [], "the record is not what etcd has"


async def _watch(
    session: aiohttp.ClientSession, url: str, kind: str, since: int, history: History, begun: asyncio.Event
) -> None:
    """Record all changes. The API server may end a watch at any time; the next one begins where it ended."""
    while True:
        query = {"watch": "true", "resourceVersion": str(since)}
        with suppress(aiohttp.ClientError):
            async with session.get(url, params=query, timeout=aiohttp.ClientTimeout(total=None)) as stream:
                begun.set()
                async for event in _events(stream):
                    assert event["type"] != "ERROR", event
                    since = int(event["object"]["metadata"]["resourceVersion"])
                    history.changes.append(Change(kind, event["type"], event["object"]))
        await asyncio.sleep(RETRY_SECONDS)


async def _events(stream: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    buffer = b""
    async for chunk in stream.content.iter_any():
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


async def _caught_up(cluster: Cluster, history: History, since: dict[str, int]) -> None:
    """Until the record holds the newest version of everything that has changed since its beginning."""

    async def complete() -> bool:
        seen = {(change.kind, change.object["metadata"]["resourceVersion"]) for change in history.changes}
        for kind, path in (("ddpjobs", paths.jobs(cluster.namespace)), ("pods", paths.pods(cluster.namespace))):
            items, _ = await cluster.client.list(path, kind)
            versions = {item["metadata"]["resourceVersion"] for item in items}
            if not all((kind, version) in seen for version in versions if int(version) > since[kind]):
                return False
        return True

    await eventually_async(complete, "the record has caught up")
