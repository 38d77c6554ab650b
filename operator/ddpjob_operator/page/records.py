"""A job as its folder has it: by the status that `ddpjob run` writes, or without one by its events."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.local.record import PodPlace, status_file
from ddpjob_operator.page import files
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import STOPPED, UNKNOWN, JobRecord
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.objects import parse_time

NAMESPACE = "local"
Mark = tuple[int, int, int]


class Records:
    """Those of all jobs of a folder. A list that is looked at again reads only what has changed."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: dict[str, tuple[Mark | None, JobRecord]] = {}

    def all(self) -> list[JobRecord]:
        known = {name: self._record(name) for name in self._shared.job_names()}
        self._known = known
        return [record for _, record in known.values()]

    def _record(self, name: str) -> tuple[Mark | None, JobRecord]:
        mark, known = self._mark(name), self._known.get(name)
        if known is not None and known[0] == mark:
            record = known[1]
            # a process that ends says nothing to any file
            if record.status.is_final or files.is_running(self._shared, name) == _runs(record):
                return known
        return mark, record_of(self._shared, name)

    def _mark(self, name: str) -> Mark | None:
        """Of the file that says how the job is; another one once that has changed."""
        shared = self._shared
        found = shared.status(status_file(shared.root, name)) or shared.status(files.events_file(shared, name))
        return _mark_of(found) if found is not None else None


def _mark_of(found: os.stat_result) -> Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _runs(record: JobRecord) -> bool:
    """Whether a process of it ran when the record was made."""
    return record.phase not in (STOPPED, UNKNOWN)


def record_of(shared: Shared, name: str) -> JobRecord:
    """A job by its status file, or without one by its events."""
    path = status_file(shared.root, name)
    found = shared.json(path)
    given = found.get("status")
    if isinstance(given, dict):
        status = parse_status(given)
        running = status.is_final or files.is_running(shared, name)
        if not running and isinstance((again := shared.json(path)).get("status"), dict):
            # it may have ended since the file was read, which then says how
            found, status = again, parse_status(again["status"])
            running = status.is_final
        phase = str(status.phase or Phase.PENDING) if running else STOPPED
        created = _created(found)
    else:
        running = files.is_running(shared, name)  # asked before its events, of which the last says how it has ended
        events = files.outline_of_events(shared, name)
        created, ours = files.created_of(shared, name), events
        if created is not None:  # earlier jobs of the name have written to the same file
            ours = files.events_since(events, created)
        started = files.moment(ours[0].get("time")) if ours else None
        if len(ours) < len(events):  # the first event of this job may be one that was not read
            started = min(files.began_of(shared, name).values(), default=started)
        created = created or started
        status, phase = _status_by_events(ours, running, started)
    return JobRecord(
        namespace=NAMESPACE,
        name=name,
        uid=str(found.get("uid") or ""),
        created=created,
        phase=phase,
        status=status,
        nodes=_positive(found.get("nodes")),
        ranks_per_node=_positive(found.get("procsPerNode")),
        about=(("Logs", str(shared.logs(name))), ("Snapshots", str(shared.checkpoints(name)))),
        places=tuple(_places(found.get("places"))),
    )


def _status_by_events(
    events: list[dict[str, Any]], running: bool, started: datetime | None
) -> tuple[DDPJobStatus, str]:
    """What the events say of a job whose status is in a cluster, or that an older version ran."""
    steps = [event["step"] for event in events if isinstance(event.get("step"), int)]
    totals = [event["totalSteps"] for event in events if isinstance(event.get("totalSteps"), int)]
    attempt = max((event["attempt"] for event in events if isinstance(event.get("attempt"), int)), default=0)
    progress = {"step": steps[-1], "totalSteps": totals[-1] if totals else None} if steps else None
    finished = bool(events) and events[-1].get("event") == "finished"
    phase = str(Phase.SUCCEEDED) if finished else str(Phase.RUNNING) if running else UNKNOWN
    given = {
        "attempt": attempt,
        "phase": None if phase == UNKNOWN else phase,
        "progress": progress,
        "startTime": started,
        "completionTime": files.moment(events[-1].get("time")) if finished else None,
    }
    return parse_status(given), phase


def _places(given: object) -> Iterator[PodPlace]:
    for place in given if isinstance(given, list) else ():
        found = [place.get(key) for key in ("pod", "attempt", "nodeRank")] if isinstance(place, dict) else []
        match found:
            case [str(pod), int(attempt), int(node_rank)]:
                yield PodPlace(pod, attempt, node_rank)


def _created(found: dict[str, Any]) -> datetime | None:
    with suppress(TypeError, ValueError):
        created = parse_time(found.get("created"))
        return created if created is None or created.tzinfo else created.replace(tzinfo=UTC)
    return None


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
