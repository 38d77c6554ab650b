"""Lists everything from time to time: to learn what was there before, and what a lost watch did not announce.

A watch that starts over lists again, but kopf passes on only what exists, and holds all of it in memory. A pod that was
deleted meanwhile would be remembered for ever, and a restart never begin. So the lists are our own: page by page, what
they lack is dropped, and every job is looked at again: from time to time, and at once in a namespace where a watch has
expired. Watches begin where the lists end (`watch_from`).

A replica that begins to lead lists everything first: its watches may lag behind what the last leader wrote.

A namespace whose lists fail keeps no other one waiting: it may be gone, and the operator's rights in it with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ddpjob_operator import metrics
from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.cache import Cache, Json, Listed
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.values import names
from ddpjob_operator.runtime.client import PAGE, Client, Page
from ddpjob_operator.runtime.errors import ApiError, without_frames
from ddpjob_operator.runtime.paths import namespace_of
from ddpjob_operator.runtime.queue import Backoff
from ddpjob_operator.shards import Shard
from ddpjob_operator.wire.pods import decode_pods

logger = logging.getLogger(__name__)

YIELD_AFTER = 20
"""Objects of a page that are taken in before others go on."""

EARLY_SECONDS = 0.001
"""By which uvloop, whose clock has whole milliseconds, may end a wait before its time."""

OUR_PODS = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"


@dataclass(eq=False)
class Resync:
    """The periodic lists of the namespaces that are served (none named: all of them)."""

    client: Client
    cache: Cache
    namespaces: tuple[str, ...]
    every: float
    enqueue: Callable[[Iterable[Key]], None]
    shard: Shard = Shard()  # noqa: RUF009 - it is frozen
    """Whose objects are kept."""
    first_done: asyncio.Event = field(default_factory=asyncio.Event)
    healthy: bool = False
    """Whether the last round of lists succeeded, for one namespace at least."""
    _started_over: bool = False
    _missed: set[str | None] = field(default_factory=set)
    """Namespaces whose watches have missed changes."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _versions: dict[str, int] = field(default_factory=dict)
    """By path, of lists that no watch has begun from."""

    def start_over(self) -> None:
        """List everything now. No job is looked at before its namespace has been listed; lists under way count not."""
        self.cache.distrust()
        self._started_over = True
        self._wake.set()

    def missed_changes(self, namespace: str | None) -> None:
        """List this namespace (None: all) now: a watch has expired there, and its next list tells of no deletion."""
        self._missed.add(namespace)
        self._wake.set()

    async def run(self) -> None:
        """List until cancelled; what failed soon again, all the rest in its time."""
        failures, backoff, clock = 0, Backoff(first=0.5, longest=min(30.0, self.every)), asyncio.get_running_loop().time
        scopes, whole_round = self._scopes, clock()
        while True:
            self._wake.clear()
            if clock() + EARLY_SECONDS >= whole_round or self._started_over:
                self._started_over = False
                scopes, whole_round = self._scopes, clock() + self.every * random.uniform(0.9, 1.1)  # noqa: S311
            elif self._missed:
                scopes = tuple({*scopes, *self._missed}) if failures else tuple(self._missed)
            self._missed.clear()
            failed = await self.once(scopes)
            wait = max(0.0, whole_round - clock())
            if failed:
                failures += 1
                wait = min(wait, backoff.seconds(failures, random.random()))  # noqa: S311 - jitter, not a secret
                for namespace, error in failed.items():
                    where = f" in namespace {namespace}" if namespace else ""
                    logger.warning("cannot list%s: %s; trying again in %.1f s", where, explain(error), wait)
                scopes = tuple(failed)
            else:
                failures = 0
            metrics.RESYNCS.labels(result="failed" if failed else "done").inc()
            self.healthy = len(failed) < len(self._scopes)
            if self.healthy:
                self.first_done.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)

    async def once(self, scopes: tuple[str | None, ...]) -> dict[str | None, ApiError]:
        """List these namespaces (None: all of them), and have every job looked at that was known or is there.

        Returns:
            those whose lists failed, and why; the cache keeps what it had of them.
        """
        failed: dict[str | None, ApiError] = {}
        oldest: list[int] = []
        for namespace in scopes:
            try:
                jobs, pods = await self._both(namespace)
            except ApiError as error:
                without_frames(error)  # it is kept until the next round, and its frames keep it
                failed[namespace] = error
                continue
            if self._started_over:
                return failed
            self.enqueue(self.cache.end_lists(namespace, jobs, pods))
            self._versions |= {paths.jobs(namespace): jobs.version, paths.pods(namespace): pods.version}
            oldest += (jobs.version, pods.version)
        if oldest and scopes == self._scopes:
            self.cache.expire(min(oldest))
        return failed

    async def _both(self, namespace: str | None) -> tuple[Listed, Listed]:
        """Jobs and pods. Where one list fails the other one ends, too: it would go on beside the next try."""
        jobs = asyncio.create_task(self._listed(self._jobs(namespace), self.cache.put_job), name="list of jobs")
        pods = asyncio.create_task(self._listed(self._pods(namespace), self.cache.put_pod), name="list of pods")
        try:
            return await asyncio.gather(jobs, pods)
        finally:
            jobs.cancel()
            pods.cancel()

    def _jobs(self, namespace: str | None) -> AsyncIterator[Page]:
        return self.client.pages(paths.jobs(namespace), "ddpjobs", PAGE)

    def _pods(self, namespace: str | None) -> AsyncIterator[Page]:
        path = paths.pods(namespace)
        return self.client.pages(path, "pods", PAGE, decode_pods, labelSelector=OUR_PODS)

    async def _listed(self, pages: AsyncIterator[Page], put: Callable[[Json], object]) -> Listed:
        """Take in a collection page by page. Nothing of a page is kept but what the cache makes of it."""
        uids, version = set[str](), 0
        async for page in pages:
            if page.first:
                uids.clear()
            while page.items:  # nothing of it is kept while the next page is on its way
                obj = page.items.pop()
                if self.shard.has(obj["metadata"]["namespace"]):
                    uids.add(obj["metadata"]["uid"])
                    put(obj)
                if len(page.items) % YIELD_AFTER == 0:
                    await asyncio.sleep(0)
            version = page.version
        return Listed(uids, version)

    def watch_from(self, path: str) -> int | None:
        """From which resourceVersion on a watch goes on where the last list of `path` ended; each list serves for one
        watch.

        None if there is no such list: then the watch begins now, and everything is listed anew at once, so that nothing
        that happened before is missed. That is what a watch does that has lost its place (410 Gone): a deletion need
        not wait for the next round.
        """
        known = next((listed for listed in self._versions if path.endswith(listed)), None)
        if known is None:
            self.missed_changes(namespace_of(path) or None)
            return None
        return self._versions.pop(known)

    @property
    def _scopes(self) -> tuple[str | None, ...]:
        return self.namespaces or (None,)


def explain(error: ApiError) -> str:
    """The error, with what to do about the ones that an administrator causes."""
    if error.not_found:
        return f"{error} (is the CRD ddpjobs.training.ddpjob.io installed?)"
    if error.status == 403:
        return f"{error} (does the operator's Role or ClusterRole allow it?)"
    return str(error)
