"""Jobs of a cluster, with the rights of the kubeconfig that `kubectl` uses too. It gets and lists, nothing else. Where
volumes of jobs are mounted, what is on them is shown with it.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.follow.events import Happened, read_happened
from ddpjob_operator.follow.jobs import volume_in_words
from ddpjob_operator.follow.lines import Line, Wanted, pods_of
from ddpjob_operator.follow.logs import JobLogs
from ddpjob_operator.follow.rank_reports import read_reports
from ddpjob_operator.follow.read import read_job, read_pods, seen_of
from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.follow.table import printable
from ddpjob_operator.follow.why import why
from ddpjob_operator.page.answers import Answers
from ddpjob_operator.page.files import drawable
from ddpjob_operator.page.folder import log_of as folder_log
from ddpjob_operator.page.list_view import tone_of
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import (
    TERMINATING,
    Command,
    Course,
    Detail,
    EventRow,
    JobRecord,
    LogQuery,
    LossPoint,
    PodRow,
    Scope,
    SnapshotRow,
    SourceError,
)
from ddpjob_operator.page.volumes import Left, Volumes, with_volume
from ddpjob_operator.page.volumes import log_of as volume_log
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.events import EventView
from ddpjob_operator.wire.jobs import parse_status, ranks_per_node
from ddpjob_operator.wire.links import links_of_annotations
from ddpjob_operator.wire.objects import parse_time
from ddpjob_operator.wire.pods import parse_pod

_SECONDS_SHARED = 1.5
_MOST_LINES_ON_PAGE = 40
_MOST_LINES_AHEAD = 5000
"""Of a window that takes no more, as that of a laptop that sleeps. It shows no more than this."""
_MOST_COURSES = 100
_LOG_BYTES = 64 << 20
"""Of the lines of a page, while it is made."""
_MOST_POINTS = 5000
_STEP_LINE = re.compile(r"step ([0-9]{1,18}) of [0-9]+,.* loss ([0-9]{1,40}\.[0-9]+)(?:, ([0-9]{1,40}) samples/s)?")
"""What the built-in trainer prints. A script may print anything."""


@dataclass(slots=True)
class _Seen:
    """The losses and the throughput of one job that this process has seen: the API server has only the last."""

    uid: str
    points: dict[int, LossPoint] = field(default_factory=dict)
    lost: list[LossPoint] = field(default_factory=list)
    """Of steps that were trained again, or will be."""
    _reached: int | None = None

    def add(self, points: Iterable[LossPoint], reached: int | None) -> None:
        """What is seen now, with the step that the job has last reported. A restart takes it back: by that it is known,
        since a status has the number of the new attempt before it has a step of it. One after which the job has come
        further again before it is looked at is not known.
        """
        gone: list[LossPoint] = []
        if reached is not None:
            if self._reached is not None and reached < self._reached:
                gone = [self.points.pop(step) for step in sorted(self.points) if step > reached]
            self._reached = reached
        for point in points:
            self.points[point.step] = point
        # the log of the new attempt may be ahead of its status, and have been seen before
        self.lost += [point for point in gone if not self._has(point.step, point.attempt)]
        del self.lost[:-_MOST_POINTS]
        while len(self.points) > _MOST_POINTS:
            del self.points[min(self.points)]

    def _has(self, step: int, attempt: int) -> bool:
        return step in self.points and self.points[step].attempt == attempt


class ClusterSource:
    """The jobs of one namespace, or (None) of all."""

    def __init__(
        self, client: Client, namespace: str | None, context: str | None = None, volumes: Volumes | None = None
    ) -> None:
        self._client, self._namespace, self._context, self._volumes = client, namespace, context, volumes
        self._answers = Answers(_SECONDS_SHARED)
        self._records: dict[str, tuple[str, JobRecord]] = {}
        self._courses: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    @property
    def scope(self) -> Scope:
        return Scope.CLUSTER

    @property
    def where(self) -> str:
        within = f"namespace {self._namespace}" if self._namespace is not None else "all namespaces"
        return f"context {self._context}, {within}" if self._context else within

    @property
    def start_command(self) -> str:
        return self._command("submit train.py --nodes 2", self._namespace or self._client.namespace)

    async def jobs(self) -> Sequence[JobRecord]:
        return await self._answers.get("jobs", self._jobs)

    async def detail(self, namespace: str, name: str) -> Detail | None:
        if self._namespace not in (None, namespace):
            return None
        return await self._answers.get((namespace, name), lambda: self._detail(namespace, name))

    async def log(self, namespace: str, name: str, query: LogQuery) -> Sequence[Line] | None:
        job = await self._job(namespace, name)
        if job is None:
            left = await self._left(namespace, name)
            return None if left is None else await asyncio.to_thread(folder_log, left.shared, name, query)
        try:
            lines = [line async for line in self._logs(namespace, job, query).now()]
        except ApiError as error:
            raise _refused(error) from error
        return lines or await self._lines_on_volume(job, query)

    async def follow(self, namespace: str, name: str, query: LogQuery) -> AsyncGenerator[Line]:
        job = await self._job(namespace, name)
        if job is None:
            for of_gone in await self.log(namespace, name, query) or ():
                yield of_gone
            return
        for of_gone in await self._lines_of_gone_pods(namespace, job, query):
            yield of_gone
        lines: asyncio.Queue[Line | None] = asyncio.Queue(_MOST_LINES_AHEAD)

        def put(line: Line | None) -> None:
            if lines.full():
                lines.get_nowait()
            lines.put_nowait(line)

        logs = self._logs(namespace, job, query)
        following = asyncio.create_task(logs.follow(put, lambda _: None), name=f"log of {name}")
        following.add_done_callback(lambda _: put(None))
        try:
            while (line := await lines.get()) is not None:
                yield line
            following.result()
        except ApiError as error:  # the job was deleted, or the server is away
            raise _refused(error) from error
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _jobs(self) -> Sequence[JobRecord]:
        try:
            items, _ = await self._client.list(paths.jobs(self._namespace), "ddpjobs")
        except ApiError as error:
            raise _refused(error) from error
        known, self._records = self._records, {}
        for item in items:
            uid, version = item["metadata"]["uid"], item["metadata"].get("resourceVersion", "")
            before = known.get(uid)
            record = before[1] if before is not None and before[0] == version else record_of(item)
            self._records[uid] = (version, record)
        records = [record for _, record in self._records.values()]
        if self._volumes is None:
            return records
        there = [(record.namespace, record.name) for record in records]
        return [*records, *await asyncio.to_thread(self._volumes.all_left, self._namespace, there)]

    async def _job(self, namespace: str, name: str) -> Json | None:
        if self._namespace not in (None, namespace):
            return None
        try:
            return await read_job(self._client, namespace, name)
        except ApiError as error:
            if error.not_found and error.reason == "NotFound":
                return None
            raise _refused(error) from error

    async def _detail(self, namespace: str, name: str) -> Detail | None:
        job, now = await self._job(namespace, name), datetime.now(UTC)
        if job is None:
            return await asyncio.to_thread(self._volumes.detail_of, namespace, name, now) if self._volumes else None
        record, shared, notes = record_of(job), self._volume_of(job), []
        pods: list[Json] = []
        happened: list[tuple[EventView, Happened]] = []
        lines: list[Line] = []
        try:
            pods = await read_pods(self._client, namespace, job)
        except ApiError as error:
            notes.append(f"Pods cannot be read: {error.message}")
        try:
            happened = await read_happened(self._client, namespace, job)
        except ApiError as error:
            notes.append(f"Events cannot be read: {error.message}")
        try:
            query = LogQuery(tail=_MOST_LINES_ON_PAGE)
            lines = [line async for line in self._logs(namespace, job, query).now()]
        except ApiError as error:
            notes.append(f"Logs cannot be read: {error.message}")
        seen = seen_of(job, pods, (event for event, _ in happened), now)
        reports = await read_reports(self._client, namespace, record.uid, record.status.attempt, seen.pods)
        found = Detail(
            job=record,
            answer=why(replace(seen, reports=reports)),
            now=now,
            course=self._course(record, lines),
            pods=pod_rows(seen.pods),
            reports=reports,
            snapshots=_snapshots(record),
            set_aside=tuple(printable(line) for line in record.status.corrupt_snapshots),
            events=tuple(_event_row(item) for _, item in happened),
            log=tuple(lines[-_MOST_LINES_ON_PAGE:]),
            commands=self._commands(record),
            notes=tuple(notes),
            log_elsewhere=self._gone_logs(record, seen.pods) if shared is None else None,
        )
        return found if shared is None else await asyncio.to_thread(with_volume, found, shared)

    def _volume_of(self, job: Json) -> Shared | None:
        metadata = job["metadata"]
        if self._volumes is None:
            return None
        return self._volumes.of_job(metadata.get("namespace") or "", metadata["name"], job.get("spec") or {})

    async def _left(self, namespace: str, name: str) -> Left | None:
        if self._volumes is None or self._namespace not in (None, namespace):
            return None
        return await asyncio.to_thread(self._volumes.left, namespace, name)

    async def _lines_on_volume(self, job: Json, query: LogQuery) -> list[Line]:
        shared = self._volume_of(job)
        return [] if shared is None else await asyncio.to_thread(volume_log, shared, record_of(job), query)

    async def _lines_of_gone_pods(self, namespace: str, job: Json, query: LogQuery) -> list[Line]:
        """None while there are pods whose log is wanted."""
        try:
            pods = [parse_pod(pod) for pod in await read_pods(self._client, namespace, job)]
        except ApiError as error:
            raise _refused(error) from error
        logs = self._logs(namespace, job, query)
        return [] if pods_of(pods, logs.wanted, logs.ranks_per_node) else await self._lines_on_volume(job, query)

    def _gone_logs(self, record: JobRecord, pods: Iterable[PodView]) -> Command | None:
        """What prints the logs of attempts that have begun and whose pods are gone."""
        begun = record.status.attempt + (record.phase != Phase.PENDING)
        gone = set(range(begun)) - {pod.attempt for pod in pods}
        if not gone or record.status.start_time is None:
            return None
        option = "" if max(gone) == record.status.attempt else f" --attempt {max(gone)}"
        return Command(
            "Logs of pods that are gone are on the job's volume. This page does not read it: it starts no pod, and the "
            "volume is not mounted here. A short-lived pod prints them:",
            self._command(f"logs {record.name}{option}", record.namespace),
        )

    def _course(self, record: JobRecord, lines: Iterable[Line]) -> Course:
        key = (record.namespace, record.name)
        seen = self._courses.get(key)
        if seen is None or seen.uid != record.uid:
            seen = self._courses[key] = _Seen(record.uid)
        self._courses.move_to_end(key)
        while len(self._courses) > _MOST_COURSES:
            self._courses.popitem(last=False)
        status = record.status
        found = _since_restart(
            LossPoint(int(m[1]), float(m[2]), status.attempt, float(m[3]) if m[3] else None)
            for m in map(_step_match, lines)
            if m
        )
        progress = status.progress
        if progress is not None and progress.step is not None and progress.loss is not None:
            loss, rate = drawable(progress.loss), drawable(progress.samples_per_second)
            found.append(LossPoint(progress.step, loss, status.attempt, rate))
        seen.add(found, progress.step if progress is not None else None)
        note = (
            "What this page has seen since it was opened, and the newest lines of the log. The volume has every step."
        )
        kept = tuple(seen.points[step] for step in sorted(seen.points))
        return Course(kept, tuple(seen.lost), note=note)

    def _logs(self, namespace: str, job: Json, query: LogQuery) -> JobLogs:
        wanted = Wanted(rank=query.rank, attempt=query.attempt, tail=query.tail)
        return JobLogs(self._client, namespace, job["metadata"]["name"], ranks_per_node(job), wanted, _LOG_BYTES)

    def _commands(self, record: JobRecord) -> tuple[Command, ...]:
        name = record.name
        found = [
            ("Follow the logs of all ranks", f"logs -f {name}"),
            ("Watch it in a terminal", f"watch {name}"),
            ("Ask why it is where it is", f"why {name}"),
            ("List its snapshots", f"snapshots ls {name}"),
        ]
        if record.phase == Phase.SUSPENDED:
            found.append(("Resume it", f"unsuspend {name}"))
        elif not record.status.is_final:
            found.append(("Save a snapshot and suspend it", f"suspend {name}"))
        if not record.status.is_final:
            found.append(("End it, and keep its volume", f"cancel {name} --keep"))
        return tuple(Command(purpose, self._command(text, record.namespace)) for purpose, text in found)

    def _command(self, text: str, namespace: str) -> str:
        context = f" --context {shlex.quote(self._context)}" if self._context else ""
        return f"ddpjob {text} -n {shlex.quote(namespace)}{context}"


def record_of(item: Json) -> JobRecord:
    """A DDPJob as the API server has it."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    status = parse_status(item.get("status") or {})
    about = [
        ("Image", str(spec.get("image") or "")),
        ("Queue", str((spec.get("scheduling") or {}).get("queue") or "")),
        ("Volume", volume_in_words(metadata["name"], spec)),
        ("Code", str((spec.get("code") or {}).get("sha256") or "")[:12]),
    ]
    return JobRecord(
        namespace=metadata.get("namespace") or "",
        name=metadata["name"],
        uid=metadata["uid"],
        created=parse_time(metadata.get("creationTimestamp")),
        phase=TERMINATING if "deletionTimestamp" in metadata else str(status.phase or Phase.PENDING),
        status=status,
        nodes=_positive(spec.get("nodes")) or 1,
        ranks_per_node=ranks_per_node(item),
        about=tuple((title, printable(text)) for title, text in about if text),
        links=links_of_annotations(metadata.get("annotations") or {}),
    )


def pod_rows(pods: Iterable[PodView]) -> tuple[PodRow, ...]:
    """The newest attempt first, by node rank, the spares last."""
    shown = sorted(pods, key=lambda pod: (-pod.attempt, pod.node_rank is None, pod.node_rank or 0, pod.name))
    return tuple(_pod_row(pod) for pod in shown)


def _pod_row(pod: PodView) -> PodRow:
    state, tone = str(pod.phase), tone_of(str(pod.phase))
    if pod.deleting:
        state, tone = "Terminating", "still"
    elif pod.ready and not pod.ended:
        state, tone = "Ready", "running"
    elif pod.reason:
        state = pod.reason
    detail = printable(pod.message)
    if pod.termination is not None:
        detail = f"exit code {pod.termination.exit_code}"
    return PodRow(pod.name, pod.attempt, pod.node_rank, printable(state), tone, pod.node_name or "", detail)


def _snapshots(record: JobRecord) -> tuple[SnapshotRow, ...]:
    found = record.status.snapshot
    return (SnapshotRow(found.step, found.time, verified=found.verified),) if found is not None else ()


def _event_row(item: Happened) -> EventRow:
    about = "" if item.kind == "DDPJob" else f"{item.kind} {item.about}"
    return EventRow(item.time, item.warning, about, item.reason, item.message, item.count)


def _since_restart(points: Iterable[LossPoint]) -> list[LossPoint]:
    """Those after the last one that goes back: a pod that a restart in place has kept goes on in its log."""
    found: list[LossPoint] = []
    for point in points:
        if found and point.step < found[-1].step:
            found.clear()
        found.append(point)
    return found


def _step_match(line: Line) -> re.Match[str] | None:
    return _STEP_LINE.match(line.text) if line.rank == 0 else None


def _refused(error: ApiError) -> SourceError:
    return SourceError(in_words(error) or str(error))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
