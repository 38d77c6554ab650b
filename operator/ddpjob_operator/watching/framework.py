"""kopf's settings, each with the limit that it answers, and what tells whether its watches live."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import kopf

from ddpjob_operator import metrics
from ddpjob_operator.api import GROUP, PLURAL, VERSION
from ddpjob_operator.cluster.resync import OUR_PODS
from ddpjob_operator.runtime.client import REQUEST_SECONDS, SILENCE_SECONDS, WATCH_SECONDS, Client
from ddpjob_operator.runtime.decode import ShallowResponse
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in, open_session
from ddpjob_operator.runtime.queue import Backoff

logger = logging.getLogger(__name__)

STOP_SECONDS = 20
DISCOVERY_POLL_SECONDS = 0.5

GOOD_SECONDS = 60.0
"""Credentials that are refused after that were good once."""


class EndlessBackoffs:
    """Waits between retries of a watch: growing to half a minute, and never running out, since kopf's watcher dies
    when they do."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
        while True:
            yield 30.0


class _NoProgress(kopf.ProgressStorage):
    """Nothing is stored of event handlers. kopf's own storages copy each object that an event brings, several times."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


class _NoDiffBase(kopf.DiffBaseStorage):
    """As `_NoProgress`: no handler asks what has changed since the last event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


def settings() -> kopf.OperatorSettings:
    """kopf as this operator needs it."""
    chosen = kopf.OperatorSettings()
    # Ours replace them: a Lease with monotonic time instead of peering by wall clock, and an event recorder
    # that aggregates.
    chosen.peering.standalone = True
    chosen.posting.enabled = False
    # No watching of CRDs and namespaces: it needs rights over the whole cluster, and we wait for the CRD ourselves.
    chosen.scanning.disabled = True
    chosen.persistence.progress_storage = _NoProgress()
    chosen.persistence.diffbase_storage = _NoDiffBase()
    # A worker for each object that has had an event waits so long for the next one.
    chosen.queueing.idle_timeout = 1.0
    chosen.networking.request_timeout = REQUEST_SECONDS
    chosen.networking.error_backoffs = EndlessBackoffs()
    # A stream that is lost without a word is noticed: bookmarks come every minute, and the server ends each request
    # in time.
    chosen.watching.inactivity_timeout = SILENCE_SECONDS
    chosen.watching.server_timeout = WATCH_SECONDS
    chosen.watching.client_timeout = WATCH_SECONDS + 30.0
    chosen.watching.connect_timeout = REQUEST_SECONDS
    chosen.watching.chunk_size = 1  # no item of a list is used, see `register_login`
    chosen.watching.label_selectors["", "v1", "pods"] = OUR_PODS
    # A handler that gets stuck in kopf at the end must not outlive the pod's grace period.
    chosen.process.ultimate_exiting_timeout = STOP_SECONDS
    return chosen


async def until_discoverable(client: Client) -> None:
    """Wait until API discovery names the resource ddpjobs.

    kopf reads discovery once, when it starts, and never watches a resource that is not there by then. An API server
    lists and serves the objects of a new CRD before its discovery names them: a second later where it is busy, and each
    of several API servers at a time of its own.
    """
    while True:
        try:
            if await _discoverable(client):
                return
            logger.info("API discovery does not name %s.%s yet", PLURAL, GROUP)
        except ApiError as error:
            logger.warning("cannot read API discovery: %s", error)
        await asyncio.sleep(DISCOVERY_POLL_SECONDS)


async def _discoverable(client: Client) -> bool:
    groups = (await client.get("/apis", "apis"))["groups"]
    if not any(group["name"] == GROUP for group in groups):
        return False
    resources = (await client.get(f"/apis/{GROUP}/{VERSION}", "apis"))["resources"]
    return any(resource["name"] == PLURAL for resource in resources)


WatchFrom = Callable[[str], int | None]
"""From which resourceVersion on the collection at a path is to be watched; None: from its own."""


def register_login(registry: kopf.OperatorRegistry, watch_from: WatchFrom | None = None) -> None:
    """Let kopf log in with the configuration that our own client reads; kopf asks again after each 401, as fast as it
    is answered.

    With `watch_from`, kopf's lists are empty: they are `cluster.resync`'s.
    """
    response = ShallowResponse if watch_from is None else _without_items(watch_from)
    pace = _Pace()

    @kopf.on.login(registry=registry, retries=None, backoff=5.0)
    async def kopf_logs_in(**_: Any) -> kopf.AiohttpSession:
        await pace.wait()
        current = await log_in()
        return kopf.AiohttpSession(server=current.server, aiohttp_session=open_session(current, _counting(), response))


class _Pace:
    """Waits between logins that follow one another, up to half a minute. Credentials may stay refused for hours, as
    those of a service account that was deleted and made again; kopf tries new ones at once, with each watch."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=0.5, longest=30.0)
        self._in_a_row, self._last = 0, -math.inf

    async def wait(self) -> None:
        clock = asyncio.get_running_loop().time
        self._in_a_row = self._in_a_row + 1 if clock() - self._last < GOOD_SECONDS else 0
        if self._in_a_row:
            await asyncio.sleep(self._backoff.seconds(self._in_a_row, random.random()))  # noqa: S311 - jitter
        self._last = clock()


def _without_items(watch_from: WatchFrom) -> type[ShallowResponse]:
    class WithoutItems(ShallowResponse):
        async def json(self, **options: Any) -> Any:
            answer = await super().json(**options)
            if not (isinstance(answer, dict) and isinstance(answer.get("items"), list)):
                return answer
            version = watch_from(self.url.path) or answer["metadata"]["resourceVersion"]
            return answer | {"items": [], "metadata": {"resourceVersion": str(version)}}

    return WithoutItems


def _counting() -> aiohttp.TraceConfig:
    """Counts the watch requests that kopf begins, which it does not tell by itself."""

    async def begun(session: Any, context: Any, request: aiohttp.TraceRequestStartParams) -> None:
        if request.url.query.get("watch") == "true":
            *_, parent, within, resource = request.url.parts
            metrics.WATCH_STARTS.labels(resource, within if parent == "namespaces" else "").inc()

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begun)
    return trace


def expected_watches(namespaces: tuple[str, ...]) -> frozenset[str]:
    """Names of the tasks in which kopf 1.45 keeps one watch each, for every kind and namespace."""
    kinds = (f"{PLURAL}.{VERSION}.{GROUP}", "pods.v1")
    return frozenset(f"watcher for {kind}@{namespace}" for kind in kinds for namespace in (namespaces or (None,)))


class Watches:
    """The tasks of kopf's watches, found by their names.

    They are kept once they are found: a loop of 20,000 pods has so many tasks that to go through them takes 20 ms.
    """

    def __init__(self, namespaces: tuple[str, ...]) -> None:
        self._expected = expected_watches(namespaces)
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def dead(self) -> list[str]:
        """Those that have ended or never begun. kopf logs the end of a watch and continues (nolar/kopf#787, #1145)."""
        if missing := self._missing():
            self._tasks |= {name: task for task in asyncio.all_tasks() if (name := task.get_name()) in missing}
        return self._missing()

    def _missing(self) -> list[str]:
        return sorted(name for name in self._expected if name not in self._tasks or self._tasks[name].done())
