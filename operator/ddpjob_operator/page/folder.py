"""Jobs in a shared folder: what `ddpjob run` leaves on this machine, or the volume of a cluster where it is mounted."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from ddpjob_operator.api.status import FailureStatus
from ddpjob_operator.core.ledger.ranks import Reports
from ddpjob_operator.core.values.names import pod_name
from ddpjob_operator.follow.lines import Line, Wanted, is_wanted, last_of, parse_line
from ddpjob_operator.follow.table import printable
from ddpjob_operator.follow.why import Answer, Section, Seen, why
from ddpjob_operator.home import expanded
from ddpjob_operator.page import files
from ddpjob_operator.page.files import Tail
from ddpjob_operator.page.list_view import size_in_words, tone_of
from ddpjob_operator.page.records import NAMESPACE, Records, record_of
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import (
    STOPPED,
    UNKNOWN,
    Command,
    Detail,
    EventRow,
    JobRecord,
    LogQuery,
    PodRow,
    Scope,
)

_SECONDS_BETWEEN_LOOKS = 0.5
_LOG_BYTES = 512 << 10
"""Of each pod's log, as a page shows it."""
_ALL_LOG_BYTES = 64 << 20
"""Of those of an attempt together."""
_LINES_AT_A_TIME = 256
_MOST_LINES_ON_PAGE = 40
PodLog = tuple[Path, int, int]
"""Path, attempt and node rank."""
_SHOWN_EVENT_FIELDS = ("message", "eval_loss", "eval_accuracy", "epoch_loss", "epoch")


class FolderSource:
    """The jobs of one folder."""

    def __init__(self, shared: Shared) -> None:
        self.shared, self._records = shared, Records(shared)

    @classmethod
    def at(cls, folder: Path) -> FolderSource:
        return cls(Shared(expanded(folder).resolve()))

    @property
    def scope(self) -> Scope:
        return Scope.FOLDER

    @property
    def where(self) -> str:
        return str(self.shared.root)

    @property
    def start_command(self) -> str:
        return f"ddpjob run job.yaml --shared {shlex.quote(str(self.shared.root))}"

    async def jobs(self) -> Sequence[JobRecord]:
        return await asyncio.to_thread(self._records.all)

    async def detail(self, namespace: str, name: str) -> Detail | None:
        if not self._has(namespace, name):
            return None
        return await asyncio.to_thread(detail_of, self.shared, name, datetime.now(UTC))

    async def log(self, namespace: str, name: str, query: LogQuery) -> Sequence[Line] | None:
        if not self._has(namespace, name):
            return None
        return await asyncio.to_thread(log_of, self.shared, name, query)

    async def follow(self, namespace: str, name: str, query: LogQuery) -> AsyncGenerator[Line]:
        if not self._has(namespace, name):
            return
        async with aclosing(logs_of(self.shared, name, query).follow()) as lines:
            async for line in lines:
                yield line

    def _has(self, namespace: str, name: str) -> bool:
        return namespace == NAMESPACE and self.shared.has(name)


class NoTimes(Exception):
    """The lines of this log have no times."""


@dataclass(frozen=True, slots=True)
class FolderLogs:
    """The logs of one job, node after node, with no more of them in memory than the lines that `wanted` leaves."""

    shared: Shared
    name: str
    wanted: Wanted
    most: int | None = None
    """Bytes of each log: lines before its last so many are left out."""
    since: str = ""
    """No line with an earlier time; RFC 3339 in UTC."""
    uid: str = ""
    """No line that says to be of a job with another uid."""

    def now(self) -> Iterator[Line]:
        """Every line that there is now.

        Raises:
            NoTimes: with `since`, of a log without times.
        """
        logs = self._wanted_logs()
        most = self.most and min(self.most, _ALL_LOG_BYTES // max(1, len(logs)))
        for path, node, ranks in logs:
            tail = Tail(path)
            lines: Iterable[str] = tail.read(self.shared, most, over=True)
            if not self.wanted.is_selective and not self.since:  # what is left out then need not be parsed
                lines = last_of(lines, self.wanted)
            yield from last_of(self._wanted_lines(lines, tail, node, ranks), self.wanted)

    async def follow(self) -> AsyncGenerator[Line]:
        """The same, with `tail` of all lines of a pod, and then each line as it comes, until the job has ended.

        Raises:
            NoTimes: as `now`.
        """
        tails: dict[Path, Tail] = {}
        followed: list[tuple[Path, int, int]] = []
        first = True
        while True:
            over = not files.is_running(self.shared, self.name)
            before, followed = followed, await asyncio.to_thread(self._wanted_logs)
            wanted = {path for path, *_ in followed}
            # the next attempt may have begun since the last look: what ended the one before is said in its last lines
            ended = [(*log, True) for log in before if log[0] not in wanted]
            for path, node, ranks, ends in (*ended, *((*log, over) for log in followed)):
                # that of a pod that is kept comes back, once the status says so
                tail = tails.setdefault(path, Tail(path))
                lines: Iterable[str] = tail.read(self.shared, self.most, over=ends)
                if first:
                    lines = await asyncio.to_thread(last_of, lines, self.wanted)
                rest = iter(lines)
                while some := await asyncio.to_thread(_next_of, rest):
                    for line in self._wanted_lines(some, tail, node, ranks):
                        yield line
            first = False
            if over:
                return
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    def _wanted_logs(self) -> list[tuple[Path, int, int]]:
        """Those that can have a wanted line, with the node rank and the ranks per node."""
        record = record_of(self.shared, self.name)
        # with a uid the lines say which job they are of: one of a cluster, where a pod with a new place has a new log
        found = all_pod_logs(self.shared, self.name) if self.uid else _logs_by_place(self.shared, record)
        attempt = self.wanted.attempt
        if attempt is None:
            attempts = [attempt for _, attempt, _ in found]
            attempt = record.status.attempt if record.status.attempt in attempts else max(attempts, default=0)
        ranks = record.ranks_per_node
        # without their number a rank is on no certain node
        wanted_node = self.wanted.node if ranks is None else self.wanted.node_of(ranks)
        return [(path, node, ranks or 1) for path, of, node in found if of == attempt and wanted_node in (None, node)]

    def _wanted_lines(self, lines: Iterable[str], tail: Tail, node: int, ranks_per_node: int) -> Iterator[Line]:
        for text in lines:
            if self.uid and tail.uid not in (None, self.uid):
                return
            if self.since and tail.ranks is None:
                raise NoTimes(tail.path)
            # a log that `ddpjob run` wrote has no times
            line = parse_line(f" {text}" if tail.ranks is None else text, node, tail.ranks or ranks_per_node)
            if line.stamp >= self.since and is_wanted(line, self.wanted):
                yield line


def detail_of(shared: Shared, name: str, now: datetime) -> Detail:
    job, events = record_of(shared, name), files.events_of(shared, name)
    snapshots, set_aside = files.snapshots_of(shared, name)
    reports, logs = reports_of(shared, job), _logs_by_place(shared, job)
    return Detail(
        job=job,
        answer=answer_of(job, now, reports),
        now=now,
        course=files.course_of(shared, name, events),
        pods=_pods(shared, job, logs),
        reports=reports,
        snapshots=tuple(snapshots),
        set_aside=tuple(set_aside),
        events=event_rows(job.status.failures, events, job.created),
        stacks=tuple(files.stacks_of(shared, name, job.created)),
        log=tuple(log_of(shared, name, LogQuery(tail=max(4, _MOST_LINES_ON_PAGE // (job.nodes or 1))))),
        commands=_commands(shared, job, logs),
        began=files.began_of(shared, name, job.uid),
    )


def log_of(shared: Shared, name: str, query: LogQuery) -> list[Line]:
    """The last lines of each pod, in the order of the node ranks."""
    return list(logs_of(shared, name, query).now())


def reports_of(shared: Shared, job: JobRecord) -> Reports:
    """What the ranks of the newest attempt last said."""
    return files.reports_of(shared, job.name, job.uid, job.status.attempt)


def answer_of(job: JobRecord, now: datetime, reports: Reports) -> Answer:
    """Why the job is where it is, as far as its folder says."""
    status, created = job.status, job.created or now
    if job.phase == STOPPED:
        command = "starts it again; without a snapshot, a script goes on if it loads what it has saved itself"
        if status.snapshot is not None:
            # the record does not say whether the run began anew, as the same command then would again
            step = status.snapshot.step
            command = f"resumes it from the snapshot of step {step}, with --resume in place of --fresh if it has that"
        todo = Section("What to do", (f"The same command as before {command}.",))
        return Answer(f"{job.name}: stopped before its end; no process of it runs here", (todo,))
    if job.phase == UNKNOWN or status.phase is None:
        return Answer(f"{job.name}: the folder has its logs and snapshots, but not its status", ())
    return why(Seen(job.name, created, None, status, (), (), now, reports))


def _pods(shared: Shared, job: JobRecord, logs: Iterable[PodLog]) -> tuple[PodRow, ...]:
    """A row for each log, with its newest place; those of the current attempt are in the phase of the job."""
    failed = {failure.pod_name: failure.reason for failure in job.status.failures}
    rows = []
    for path, (attempt, node) in {path: (attempt, node) for path, attempt, node in logs}.items():
        current = attempt == job.status.attempt
        state = failed.get(path.stem) or (job.phase if current else "Ended")
        tone = "bad" if path.stem in failed else tone_of(job.phase) if current else "still"
        size = shared.status(path)
        detail = f"log of {size_in_words(size.st_size)}" if size is not None else ""
        rows.append(PodRow(path.stem, attempt, node, state, tone, "", detail))
    return tuple(sorted(rows, key=lambda row: (-row.attempt, row.node_rank or 0)))


def event_rows(
    failures: Iterable[FailureStatus], events: list[dict[str, Any]], since: datetime | None
) -> tuple[EventRow, ...]:
    """Failures, and what rank 0 has noted since the job was created: before that it was one of an earlier job."""
    rows = []
    for event in files.events_since(events, since):
        kind, time = event.get("event"), files.moment(event.get("time"))
        if time is None or not isinstance(kind, str):
            continue
        said = [_said(name, event[name]) for name in _SHOWN_EVENT_FIELDS if event.get(name) is not None]
        step = f"step {event['step']}" if isinstance(event.get("step"), int) else ""
        text = ", ".join(filter(None, (step, *said)))
        attempt = event.get("attempt")
        rows.append(EventRow(time, kind.startswith("non_finite"), f"attempt {attempt}", printable(kind), text))
    rows += [
        EventRow(failure.time, True, f"attempt {failure.attempt}", failure.reason, printable(failure.message))
        for failure in failures
    ]
    return tuple(sorted(rows, key=lambda row: row.time))


def _said(name: str, value: object) -> str:
    if name == "message":
        return printable(str(value))
    return f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {printable(str(value))}"


def _commands(shared: Shared, job: JobRecord, found: Iterable[PodLog]) -> tuple[Command, ...]:
    folder, name = shlex.quote(str(shared.root)), shlex.quote(job.name)
    logs = shlex.quote(str(shared.logs(job.name)))
    attempt = job.status.attempt
    named = shared.logs(job.name) / "pods" / f"{pod_name(job.name, attempt, 0)}.log"
    first = shlex.quote(str([named, *(path for path, *place in found if place == [attempt, 0])][-1]))
    commands = [
        Command("Follow the log of node rank 0", f"tail -f {first}"),
        Command("List the snapshots", f"ddpjob snapshots ls {name} --shared {folder}"),
        Command("Verify the snapshots", f"ddpjob snapshots verify {name} --shared {folder}"),
        Command("Print the loss of each step", f"python -m ddp_trainer.logs {logs}"),
    ]
    if shared.is_folder(shared.logs(job.name) / "tensorboard"):
        commands.append(Command("Open TensorBoard", f"tensorboard --logdir {logs}/tensorboard"))
    return tuple(commands)


def logs_of(shared: Shared, name: str, query: LogQuery, uid: str = "") -> FolderLogs:
    """The lines that a page shows; with a uid, of that job alone."""
    wanted = Wanted(rank=query.rank, attempt=query.attempt, tail=query.tail)
    return FolderLogs(shared, name, wanted, _LOG_BYTES, uid=uid)


def _next_of(lines: Iterator[str]) -> list[str]:
    """Those that a thread reads at a time."""
    return list(islice(lines, _LINES_AT_A_TIME))


def _logs_by_place(shared: Shared, job: JobRecord) -> list[PodLog]:
    """Each log of this very job, once for each place that its pod had: `ddpjob run` writes one for each pod, which is
    named after its first place. The order is that of the places; of a place, the newest log is the last.
    """
    logs_folder = shared.logs(job.name) / "pods"
    named = {(logs_folder / f"{place.pod}.log", place.attempt): place.node_rank for place in job.places}
    found = {(path, attempt): node for path, attempt, node in all_pod_logs(shared, job.name)}
    found = {log: node for log, node in found.items() if log not in named} | named
    # without a status its attempt is one that has noted an event, and not every attempt has
    most = job.status.attempt if job.uid else max((attempt for _, attempt in found), default=0)
    logs = [(path, attempt, node) for (path, attempt), node in found.items() if attempt <= most]
    by_name = {path for path, _ in named}
    ours = {path for path in {path for path, *_ in logs} if _is_of_job(shared, job, path, named=path in by_name)}
    return sorted((log for log in logs if log[0] in ours), key=lambda log: log[1:])


def _is_of_job(shared: Shared, job: JobRecord, path: Path, *, named: bool) -> bool:
    """Whether there is such a log, and the status names it. One that it does not name, as of an older version, is of
    the job if it has been written to since the run began: a larger run of the name before has left logs that this one
    does not go on with.
    """
    status = shared.status(path)
    begun = job.created.timestamp() if job.uid and job.created else 0.0
    return status is not None and (named or status.st_mtime >= begun)


def all_pod_logs(shared: Shared, name: str) -> list[PodLog]:
    """Those whose names have their place."""
    stem, folder = re.escape(pod_name(name, 0, 0).removesuffix("-0-0")), shared.logs(name) / "pods"
    # a number as the launcher writes it: each log of a node is there once
    pattern = re.compile(stem + r"-(0|[1-9]\d{0,5})-(0|[1-9]\d{0,3})\.log")
    logs = ((each, pattern.fullmatch(each)) for each in shared.names(folder))
    found = [(folder / each, int(match[1]), int(match[2])) for each, match in logs if match]
    return sorted(found, key=lambda item: (item[1], item[2]))
