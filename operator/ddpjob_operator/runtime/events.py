"""Kubernetes Events about jobs: posted aside, so that nothing waits for them, aggregated and capped.

A repetition of an event within an hour raises the count of the first Event (one patch) rather than making another,
as client-go's correlator does. A job may make `CAP` new Events, refilled one every five minutes; what is beyond is
dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from ddpjob_operator import metrics
from ddpjob_operator.runtime import paths
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError

logger = logging.getLogger(__name__)

CAP = 25
REFILL_SECONDS = 300.0
SAME_WITHIN_SECONDS = 3600.0
_REMEMBERED = 4096
_WAITING = 1024
_LONGEST_MESSAGE = 1024
"""The API server refuses an Event with a longer one."""


class Event(Protocol):
    """A core/v1 Event about a job; a hashable value."""

    @property
    def type(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def message(self) -> str: ...


class Subject(NamedTuple):
    """The object that an event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(slots=True)
class _Posted:
    name: str
    at: float
    count: int = 1


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


@dataclass(eq=False)
class EventRecorder:
    """Takes events without waiting, and posts them one after another from a task of its own."""

    client: Client
    instance: str = ""
    _waiting: asyncio.Queue[tuple[Subject, Event]] = field(default_factory=lambda: asyncio.Queue(_WAITING))
    _posted: OrderedDict[tuple[str, Event], _Posted] = field(default_factory=OrderedDict)
    _allowances: dict[str, _Allowance] = field(default_factory=dict)
    _serial: int = 0

    def record(self, about: Subject, event: Event) -> None:
        """Queue an event. Too many at once are dropped: they are news, not a record."""
        try:
            self._waiting.put_nowait((about, event))
        except asyncio.QueueFull:
            metrics.EVENTS.labels(result="dropped").inc()

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            about, event = await self._waiting.get()
            try:
                result = await self._post(about, event)
            except ApiError as error:
                result = "failed"
                logger.debug(
                    "the event %s of %s/%s was not posted: %s", event.reason, about.namespace, about.name, error
                )
            finally:
                self._waiting.task_done()
            metrics.EVENTS.labels(result=result).inc()

    async def drain(self, within: float) -> None:
        """Wait until all recorded events are posted, for at most so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("%d events were not posted before the end", self._waiting.qsize())

    async def _post(self, about: Subject, event: Event) -> str:
        loop_time, key = asyncio.get_running_loop().time(), (about.uid, event)
        before = self._posted.get(key)
        now = datetime.now(UTC)
        if before is not None and loop_time - before.at < SAME_WITHIN_SECONDS:
            before.count += 1
            path = f"{paths.events(about.namespace)}/{before.name}"
            try:
                await self.client.merge_patch(path, "events", {"count": before.count, "lastTimestamp": _stamp(now)})
            except ApiError as error:
                if not error.not_found:
                    raise
                del self._posted[key]  # it has expired on the server (after an hour by default)
            else:
                return "repeated"
        if not self._allowed(about.uid, loop_time):
            return "capped"
        self._serial += 1
        stem = about.name[:200].rstrip("-.")  # a part of an object's name cannot end in either
        name = f"{stem}.{int(now.timestamp() * 1e6):x}.{self._serial:x}"
        await self.client.create(
            paths.events(about.namespace), "events", manifest(about, event, name, now, self.instance)
        )
        self._posted[key] = _Posted(name, loop_time)
        if len(self._posted) > _REMEMBERED:
            self._posted.popitem(last=False)
        return "posted"

    def _allowed(self, uid: str, now: float) -> bool:
        """Token bucket: whether this job may make one more Event now."""
        allowance = self._allowances.setdefault(uid, _Allowance(CAP, now))
        allowance.left = min(CAP, allowance.left + (now - allowance.at) / REFILL_SECONDS)
        allowance.at = now
        if allowance.left < 1:
            return False
        allowance.left -= 1
        if len(self._allowances) > _REMEMBERED:  # one that is full again says as much as none
            full = CAP * REFILL_SECONDS
            self._allowances = {of: known for of, known in self._allowances.items() if now - known.at < full}
        return True


def manifest(about: Subject, event: Event, name: str, now: datetime, instance: str) -> Json:
    """The Event object (core/v1, which kubectl describe reads on every version)."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.namespace},
        "involvedObject": {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_LONGEST_MESSAGE],
        "count": 1,
        "firstTimestamp": _stamp(now),
        "lastTimestamp": _stamp(now),
        "source": {"component": "ddpjob-operator"},
        "reportingComponent": "training.ddpjob.io/operator",
        "reportingInstance": instance[:128],
    }


def _stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
