"""The events of a job, of its pods and of its claim: those that there are, or as they come until the job has ended.

Pods of earlier attempts are gone, but not their events. They are recognised by the names that the operator gives pods.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.core.values.names import initializer_name, pod_name, pvc_name
from ddpjob_operator.follow.outage import Patient
from ddpjob_operator.follow.read import read_job
from ddpjob_operator.follow.table import printable
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.paths import events as events_path
from ddpjob_operator.wire.events import EventView, parse_event
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.objects import parse_time

SECONDS_BETWEEN_LOOKS = 2.0
LATE_SECONDS = 10.0
"""How long the event of a job's end may be missing: the operator posts it after the status, and a busy one later. One
that has expired never comes."""

_ENDS = ("Succeeded", "Failed", "InvalidSpec")
"""Reasons of the event with which a job ends."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of a job."""

    time: datetime
    warning: bool
    kind: str
    """Kind of the object: DDPJob, Pod or PersistentVolumeClaim."""
    about: str
    """Name of the object."""
    attempt: int | None
    """Of a pod of the gang."""
    reason: str
    count: int
    message: str

    def line(self, today: datetime) -> str:
        """Such as `12:00:06Z attempt 0, pod digits-0-1: Warning FailedScheduling (x3): 0/2 nodes are available`."""
        date = "" if self.time.date() == today.date() else f"{self.time:%Y-%m-%d} "
        often = f" (x{self.count})" if self.count > 1 else ""
        type_ = "Warning " if self.warning else ""
        return f"{date}{self.time:%H:%M:%S}Z {self._where()}: {type_}{self.reason}{often}: {self.message}"

    def _where(self) -> str:
        match self.kind:
            case "DDPJob":
                return "job"
            case "Pod":
                return f"attempt {self.attempt}, pod {self.about}" if self.attempt is not None else f"pod {self.about}"
            case _:
                return f"claim {self.about}"


def happened_to(job: Json, events: Iterable[EventView]) -> list[tuple[EventView, Happened]]:
    """Those of the job, oldest first. Events before its creation are of an earlier job of the same name."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    created = parse_time(job["metadata"].get("creationTimestamp"))
    gang = re.compile(re.escape(pod_name(name, 0, 0).removesuffix("-0-0")) + r"-(\d+)-s?\d+")
    initializers = re.compile(re.escape(initializer_name(name, 0).removesuffix("-0")) + r"-\d+")
    found = []
    for event in events:
        pod = gang.fullmatch(event.about) if event.kind == "Pod" else None
        ours = (
            event.about_uid == uid
            or pod is not None
            or (event.kind == "Pod" and initializers.fullmatch(event.about) is not None)
            or (event.kind == "PersistentVolumeClaim" and event.about == pvc_name(name))
        )
        if ours and (created is None or event.time >= created):
            found.append((event, _happened(event, int(pod[1]) if pod is not None else None)))
    # times are of whole seconds; the names of one object's events grow with time
    return sorted(found, key=lambda item: (item[0].time, item[0].name))


async def read_happened(client: Client, namespace: str, job: Json) -> list[tuple[EventView, Happened]]:
    """The events of the job that the API server still has.

    Raises:
        ApiError: the user may not read them.
    """
    metadata = job["metadata"]
    claim = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={pvc_name(metadata['name'])}"
    found = await asyncio.gather(
        *(
            client.list(events_path(namespace), "events", fieldSelector=selector)
            for selector in (f"involvedObject.uid={metadata['uid']}", "involvedObject.kind=Pod", claim)
        )
    )
    return happened_to(job, filter(None, (parse_event(item) for items, _ in found for item in items)))


async def follow_events(
    client: Client,
    namespace: str,
    name: str,
    say: Callable[[Happened], None],
    note: Callable[[str], None] = lambda _: None,
) -> bool:
    """Each event as it comes, and again when its count is raised, until the job has ended.

    Returns:
        whether it succeeded.

    Raises:
        ApiError: there is no such job, it was deleted, the user may not read events, or the cluster gave no answer for
            five minutes.
    """
    said: set[tuple[str, int]] = set()
    patient, clock = Patient(note), asyncio.get_running_loop().time
    until: float | None = None
    uid: str | None = None
    while True:
        job = await patient.read(read_job, client, namespace, name, uid)
        uid = job["metadata"]["uid"]
        status = parse_status(job.get("status") or {})
        if status.is_final and until is None:
            until = clock() + LATE_SECONDS
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        has_end = False
        for event, happened in await patient.read(read_happened, client, namespace, job):
            has_end = has_end or (happened.kind == "DDPJob" and happened.reason in _ENDS)
            if (event.uid, event.count) not in said:
                said.add((event.uid, event.count))
                say(happened)
        if until is not None and (has_end or clock() >= until):
            return status.phase == "Succeeded"
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


def _happened(event: EventView, attempt: int | None) -> Happened:
    return Happened(
        time=event.time,
        warning=event.is_warning,
        kind=event.kind,
        about=printable(event.about),
        attempt=attempt,
        reason=printable(event.reason),
        count=event.count,
        message=printable(event.message),
    )
