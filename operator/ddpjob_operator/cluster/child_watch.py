"""Notices when somebody deletes what a job relies on besides its pods: its Service, claim, NetworkPolicies, PodGroup.

One watch for each kind (and namespace), of metadata alone, begins where a list ends. It costs a request in five
minutes, and one in 70 to 105 s where nothing changes (`client.SILENCE_SECONDS`). The list also says what exists, so
that a new process need not ask for it job by job. Of Services the whole object is read: the next one gets the address
of the one that is gone.

A kind that is not installed, or that the operator may not watch, is tried again with each resync. Until then nothing of
it counts as known, and the next pass of a job creates it, or finds it there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ddpjob_operator import metrics
from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.cache import Cache, Json
from ddpjob_operator.cluster.children import CLAIM, KINDS, POD_GROUP, SERVICE, Kind
from ddpjob_operator.cluster.owners import Key, controller_of
from ddpjob_operator.cluster.resync import OUR_PODS as OURS
from ddpjob_operator.cluster.resync import explain
from ddpjob_operator.core.values.names import pvc_name, service_name
from ddpjob_operator.runtime.client import METADATA, METADATA_LIST, PAGE, Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.queue import Backoff

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""After a deletion, until the job is looked at: where it is gone itself, the watch of jobs tells that by then."""

SHORTEST_SECONDS = 1.0
"""Between two requests for one watch."""

LASTS_SECONDS = 10.0
"""A watch that breaks after that was one that works."""

OVER = ("Succeeded", "Failed")


@dataclass(eq=False)
class ChildWatch:
    """The watches of the namespaces that are served (none named: all of them)."""

    client: Client
    cache: Cache
    namespaces: tuple[str, ...]
    every: float
    """Seconds after which a kind that cannot be watched is tried again."""
    enqueue: Callable[[Key, float], None]
    """Look at a job after so many seconds."""
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once each kind has been listed, or could not be."""
    _untried: set[tuple[Kind, str | None]] = field(default_factory=set)
    _followed: set[tuple[Kind, str | None]] = field(default_factory=set)

    async def run(self) -> None:
        """Watch until cancelled. Jobs must have been listed before."""
        scopes = [(kind, namespace) for kind in KINDS for namespace in (self.namespaces or (None,))]
        self._untried = set(scopes)
        async with asyncio.TaskGroup() as group:
            for scope in scopes:
                group.create_task(self._keep(*scope), name=f"watch of {scope[0].name} @ {scope[1]}")

    async def _keep(self, kind: Kind, namespace: str | None) -> None:
        failures, why, backoff = 0, "", Backoff(first=0.5, longest=min(30.0, self.every))
        while True:
            wait = SHORTEST_SECONDS
            try:
                version = await self._list(kind, namespace)
                why = ""
                self._has_tried(kind, namespace)
                began = asyncio.get_running_loop().time()
                try:
                    await self._follow(kind, namespace, version)
                finally:  # a list that succeeds says nothing of the watch
                    if asyncio.get_running_loop().time() - began >= LASTS_SECONDS:
                        failures = 0
            except ApiError as error:
                if error.status in (403, 404):
                    why = self._know_nothing(kind, namespace, error, why)
                    wait = self.every * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, not a secret
                elif error.status != 410:
                    failures += 1
                    wait = backoff.seconds(failures, random.random())  # noqa: S311
                    logger.warning("cannot watch %s: %s; listing again in %.1f s", kind.name, error, wait)
                self._has_tried(kind, namespace)
            await asyncio.sleep(wait)

    async def _list(self, kind: Kind, namespace: str | None) -> int:
        """Take in which there are, and look at the jobs of those that are gone; the resourceVersion to watch from."""
        path, resource = paths.children(*kind, namespace)
        there, version = set[tuple[str, str]](), 0
        accept = "" if kind == SERVICE else METADATA_LIST
        async for page in self.client.pages(path, resource, PAGE, accept=accept, labelSelector=OURS):
            if page.first:
                there.clear()
            for obj in page.items:
                there.add((obj["metadata"]["namespace"], obj["metadata"]["name"]))
                self._put(kind, obj)
            page.items.clear()
            version = page.version
        self._look_at(self.cache.end_children(kind, namespace, there, version))
        return version

    async def _follow(self, kind: Kind, namespace: str | None, version: int) -> None:
        path, resource = paths.children(*kind, namespace)
        loop = asyncio.get_running_loop()
        self._followed.add((kind, namespace))
        while True:
            began = loop.time()
            metrics.WATCH_STARTS.labels(resource, namespace or "").inc()
            accept = "" if kind == SERVICE else METADATA
            async for event in self.client.watch(path, version, accept=accept, labelSelector=OURS):
                version = int(event["object"]["metadata"]["resourceVersion"])
                self._take_in(kind, resource, event)
            await asyncio.sleep(max(0.0, began + SHORTEST_SECONDS - loop.time()))

    def _take_in(self, kind: Kind, resource: str, event: Json) -> None:
        if event["type"] == "BOOKMARK":
            return
        metrics.WATCH_EVENTS.labels(resource=resource).inc()
        obj = event["object"]
        if event["type"] == "ADDED":
            self._put(kind, obj)
        elif event["type"] == "DELETED" and (key := self.cache.drop_child(kind, obj)) is not None:
            self._look_at((key,))

    def _put(self, kind: Kind, obj: Json) -> None:
        found = self.cache.job_of(obj)
        if found is None:
            return
        key, owner = found
        if not _is_made_for(key, kind, obj):
            return
        job = self.cache.job(key)
        is_over = job is not None and (job.get("status") or {}).get("phase") in OVER
        if job is not None and (not is_over or kind.name == POD_GROUP):  # else nothing is created for it again
            self.cache.put_child(owner, kind, obj)
            if is_over:
                self._look_at((key,))  # which deletes it

    def _know_nothing(self, kind: Kind, namespace: str | None, error: ApiError, before: str) -> str:
        """Why not, which is logged unless it was so `before`."""
        level = logging.INFO if error.not_found else logging.WARNING
        where = f" in namespace {namespace}" if namespace else ""
        why = f"{kind.api_version} is not installed" if error.not_found else explain(error)
        self._followed.discard((kind, namespace))
        _, resource = paths.children(*kind, namespace)
        followed = {(paths.children(*other, within)[1], within) for other, within in self._followed}
        if error.not_found and (resource, namespace) not in followed:  # the PodGroups of two schedulers share a series
            # a series that never grows again would be a watch that has stopped
            metrics.WATCH_STARTS.remove(resource, namespace or "")
        if why != before:
            logger.log(level, "%s%s is not watched: %s", kind.name, where, why)
        self._look_at(self.cache.end_children(kind, namespace, frozenset()))
        return why

    def _look_at(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.enqueue(key, SETTLE_SECONDS)

    def _has_tried(self, kind: Kind, namespace: str | None) -> None:
        self._untried.discard((kind, namespace))
        if not self._untried:
            self.tried.set()


def _is_made_for(key: Key, kind: Kind, obj: Json) -> bool:
    """Whether it is one that the operator makes for the job, whose labels others have too: `kubectl expose pod` copies
    them, and the claim of an ephemeral volume has those that the author of a podTemplate likes."""
    named = {CLAIM: pvc_name, SERVICE: service_name}.get(kind)
    if named is not None and obj["metadata"]["name"] != named(key.name):
        return False
    return kind == CLAIM or bool(controller_of(obj))  # a claim that is retained has none
