"""What a run leaves in a shared folder (docs/contracts.md section 6), read in bounded memory and, except for a log that
is wanted whole, in bounded time.

Jobs write these files: nothing in them is trusted, and a line that cannot be read is left out.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import dropwhile
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from ddpjob_operator.core.ledger.ranks import NO_REPORTS, PodThrottling, RankRow, Reports
from ddpjob_operator.core.values.trainer_report import read_live, read_throttling
from ddpjob_operator.follow.table import printable
from ddpjob_operator.local.record import ranks_file
from ddpjob_operator.local.volume import process_start
from ddpjob_operator.page.shared import Shared, json_object
from ddpjob_operator.page.values import Course, LossPoint, SnapshotRow
from ddpjob_operator.wire.objects import parse_time

_WHOLE_BYTES = 4 << 20
"""Of losses that are larger together, lines at even distances are read."""
_MOST_ATTEMPTS = 1000
_SAMPLES = 2000
_FEWEST_SAMPLES = 4
"""Of each file."""
_LONGEST_LINE = 4096
_EVENT_BYTES = 1 << 20
_OUTLINE_BYTES = 4 << 10
_OUTLINE_LINES = 20
_MOST_SNAPSHOTS = 100
_MOST_STACKS = 8
_MOST_STACK_FILES = 100
"""Whose times are asked for: a job may write any number of files."""
_MOST_RANKS = 1024
_GREATEST = 1e300
_SLACK_SECONDS = 3.0
"""A file may seem to be older than a job that wrote it: clocks of file servers and nodes differ, some times are whole
seconds."""
_STACK_BYTES = 64 << 10
_LOCK_BYTES = 1024
_ATTEMPT_FILE = re.compile(r"(\d{12})-(\d{6})-(.+)")
_SNAPSHOT = re.compile(r"(?:step|checkpoint)-(\d+)")
_UID = re.compile(rb"\(([-0-9A-Za-z]{1,64})\) starts")
_STACKS = re.compile(r"stacks-attempt-.*\.txt")
_PART_BYTES = 256 << 10
"""Of a pod's log, read at a time."""
_LONGEST_LOG_LINE = 256 << 10
"""A longer one is read in pieces."""
_HEADER_BYTES = 1024
_RUN_STARTS = re.compile(rb"---- [^\r\n]{0,500} starts(?:, (\d{1,6}) ranks, with times)?(?:\r\n|\r|\n)")


def events_of(shared: Shared, job: str) -> list[dict[str, Any]]:
    """The newest lines of events.jsonl."""
    return shared.objects(events_file(shared, job), _EVENT_BYTES)


def events_file(shared: Shared, job: str) -> Path:
    return shared.logs(job) / "events.jsonl"


def events_since(events: Iterable[dict[str, Any]], since: datetime | None) -> list[dict[str, Any]]:
    """Those of a job that was created then, not those of earlier ones of its name, which come before them. After the
    first one the clock may be set back.
    """

    def is_earlier(event: dict[str, Any]) -> bool:
        time = moment(event.get("time"))
        return time is None or not is_since(time.timestamp(), since)

    return list(events) if since is None else list(dropwhile(is_earlier, events))


def is_since(seconds: float, created: datetime | None) -> bool:
    """Whether a job that was created then may have done what has this time."""
    return created is None or seconds >= created.timestamp() - _SLACK_SECONDS


def outline_of_events(shared: Shared, job: str) -> list[dict[str, Any]]:
    """The first line of events.jsonl, the newest one with the steps of the whole run, and the newest ones down to one
    with a step. A list of jobs needs no more, and reads as little of a long run as of a short one.
    """
    lines = _first_and_last_lines(shared, events_file(shared, job))
    totals = [index for index, line in enumerate(lines) if b'"totalSteps"' in line]
    wanted = {index: json_object(lines[index]) or {} for index in (*range(len(lines))[:1], *totals[-1:])}
    for index in reversed(range(len(lines))[-_OUTLINE_LINES:]):
        wanted[index] = json_object(lines[index]) or {}
        if isinstance(wanted[index].get("step"), int):
            break
    return [wanted[index] for index in sorted(wanted) if wanted[index]]


def _first_and_last_lines(shared: Shared, path: Path) -> list[bytes]:
    """Whole lines of a file's beginning and of its end."""
    with suppress(OSError, ValueError), shared.open(path) as file:
        size, first = os.fstat(file.fileno()).st_size, file.read(2 * _OUTLINE_BYTES)
        if size <= len(first):
            return first.splitlines()
        # with the byte before, by which a first line is whole
        file.seek(max(len(first), size - _OUTLINE_BYTES) - 1)
        last = file.read(_OUTLINE_BYTES + 1)
        return [*first.split(b"\n")[:-1], *last.split(b"\n")[1:]]
    return []


def course_of(shared: Shared, job: str, events: list[dict[str, Any]]) -> Course:
    """The losses of all attempts, merged as docs/contracts.md says, and validation losses from the events."""
    kept: dict[int, LossPoint] = {}
    lost: list[LossPoint] = []
    sampled, run = False, ""
    files, total = _loss_files(shared, job)
    for path, size in files:
        if total <= _WHOLE_BYTES:
            entries: Iterable[dict[str, Any]] = shared.objects(path, _WHOLE_BYTES)
        else:
            entries, sampled = _sampled(shared, path, size, max(_FEWEST_SAMPLES, _SAMPLES * size // total)), True
        found = _ATTEMPT_FILE.fullmatch(path.stem)
        before, run = run, found[3] if found else ""
        lost = lost if run == before else []
        for entry in entries:
            after, step = entry.get("resumedAfter"), entry.get("step")
            if isinstance(after, int):
                # what an earlier run of the name trained further is not lost by this one
                lost += [point for point in kept.values() if point.step > after and run == before]
                kept = {step: point for step, point in kept.items() if step <= after}
            elif isinstance(step, int):
                loss, rate = drawable(entry.get("loss")), drawable(entry.get("samplesPerSecond"))
                kept[step] = LossPoint(step, loss, _whole(entry.get("attempt")), rate)
    last = max(kept, default=0)
    return Course(
        kept=tuple(kept[step] for step in sorted(kept)),
        lost=tuple(sorted(lost, key=lambda point: (point.attempt, point.step))),
        validation=tuple(p for p in _validations(events) if p.loss is not None and p.step <= last),
        note=f"Every n-th step of a long run: {len(kept)} of {last}." if sampled else "",
    )


def _validations(events: Iterable[dict[str, Any]]) -> Iterable[LossPoint]:
    """An attempt makes void what earlier ones, or an earlier run of the name, have found after its first step."""
    found: dict[int, LossPoint] = {}
    for event in events:
        match event:
            case {"event": "started" | "resumed", "step": int(begins_at)}:
                found = {step: point for step, point in found.items() if step <= begins_at}
            case {"event": "validated", "step": int(step)}:
                found[step] = LossPoint(step, drawable(event.get("eval_loss")), _whole(event.get("attempt")))
    return found.values()


def created_of(shared: Shared, job: str) -> datetime | None:
    """When the newest job of the name was created, by the names of its files."""
    names = [*shared.names(shared.checkpoints(job) / "attempts"), *shared.names(shared.logs(job) / "losses")]
    found = [int(match[1]) for name in names if (match := _ATTEMPT_FILE.fullmatch(name))]
    return moment(max(found)) if found else None


def began_of(shared: Shared, job: str, uid: str = "") -> dict[int, datetime]:
    """When each attempt of the job with this uid wrote its fencing token; without one, of the newest of the name."""
    newest: dict[str, dict[int, datetime]] = {}
    folder = shared.checkpoints(job) / "attempts"
    for name in shared.names(folder)[-_MOST_ATTEMPTS:]:
        found, status = _ATTEMPT_FILE.fullmatch(name), shared.status(folder / name)
        if found is not None and status is not None and uid in ("", found[3]):
            times = newest.setdefault(f"{found[1]}-{found[3]}", {})
            times[int(found[2])] = datetime.fromtimestamp(status.st_mtime, UTC)
    return newest[max(newest)] if newest else {}


def snapshots_of(shared: Shared, job: str) -> tuple[list[SnapshotRow], list[str]]:
    """Snapshots and checkpoints, the newest first, and those that were set aside with their reason."""
    found: list[SnapshotRow] = []
    aside: list[str] = []
    for name in sorted(shared.names(shared.checkpoints(job)), key=_step_of, reverse=True):
        folder = shared.checkpoints(job) / name
        if _SNAPSHOT.fullmatch(name) and len(found) < _MOST_SNAPSHOTS:
            found.append(_snapshot(_step_of(name), shared.json(folder / "manifest.json")))
        elif name.endswith(".corrupt") and _SNAPSHOT.match(name) and len(aside) < _MOST_SNAPSHOTS:
            reason = " ".join(shared.read(folder / "reason.txt", 500).decode(errors="replace").split())
            aside.append(f"{name}: {reason}" if reason else name)
    return found, aside


def reports_of(shared: Shared, job: str, uid: str, attempt: int) -> Reports:
    """What the pods of this attempt last said, if `ddpjob run` has noted it."""
    found = shared.json(ranks_file(shared.root, job))
    ranks, throttling = found.get("ranks"), found.get("throttling")
    if (found.get("uid"), found.get("attempt")) != (uid, attempt) or not isinstance(ranks, list):
        return NO_REPORTS
    given = [rank for rank in ranks[:_MOST_RANKS] if isinstance(rank, dict) and isinstance(rank.get("rank"), int)]
    pods = list(throttling.items())[:_MOST_RANKS] if isinstance(throttling, dict) else []
    return Reports(
        tuple(map(_rank, given)),
        tuple(
            PodThrottling(printable(pod), "", read) for pod, said in pods if (read := read_throttling(said)) is not None
        ),
        live=read_live(live, live.get("worldSize")) if isinstance(live := found.get("live"), dict) else None,
    )


def _rank(given: dict[str, Any]) -> RankRow:
    step, time = given.get("step"), None
    with suppress(TypeError, ValueError):
        time = parse_time(given.get("time"))
    return RankRow(
        rank=given["rank"],
        pod=printable(str(given.get("pod") or "")),
        phase=printable(str(given.get("phase") or "")),
        step=step if isinstance(step, int) else None,
        step_seconds=drawable(given.get("stepSeconds")),
        data_seconds=drawable(given.get("dataSeconds")),
        passes_seconds=drawable(given.get("passesSeconds")),
        time=time if time is not None and time.tzinfo else None,
    )


def stacks_of(shared: Shared, job: str, since: datetime | None = None) -> list[tuple[str, str]]:
    """The files with stacks of ranks that were written since that time, by name: of many, the last."""
    folder = shared.logs(job)
    found = [name for name in shared.names(folder) if _STACKS.fullmatch(name)][-_MOST_STACK_FILES:]
    ours = [name for name in found if (status := shared.status(folder / name)) and is_since(status.st_mtime, since)]
    texts = ((name, shared.read(folder / name, _STACK_BYTES).decode(errors="replace")) for name in ours[-_MOST_STACKS:])
    return [(name, text) for name, text in texts if text]


def is_running(shared: Shared, job: str) -> bool:
    """Whether a `ddpjob run` on this machine holds the job. The lock itself is not tried: that would refuse a run. One
    that was killed leaves its file, and another process may have its number by now.
    """
    holder = json_object(shared.read(shared.checkpoints(job) / "run.lock", _LOCK_BYTES)) or {}
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0 or holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no system has so large a number
        return False
    except OSError:
        pass  # it is another user's
    # an older version notes no start
    start, found = holder.get("start"), process_start(pid)
    return start is None or found is None or start == found


@dataclass(slots=True)
class Tail:
    """A log file that is read as it grows, in parts, however large it is."""

    path: Path
    position: int = 0
    uid: str | None = None
    """Of the job on a cluster, or of the pod of `ddpjob run`, that wrote the newest run."""
    ranks: int | None = None
    """Of its pod, if a launcher on a cluster wrote it; each line then begins with its time. Known once it is read."""
    _partial: bytes = field(default=b"")

    def read(self, shared: Shared, most: int | None = None, *, over: bool = False) -> Iterator[str]:
        """The lines that were finished since the last call, at first those of the newest run.

        Lines before the last `most` bytes are left out. Where the log is `over`, its last line may have no end.
        """
        with suppress(OSError, ValueError), shared.open(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.position:
                self.position, self._partial = 0, b""
            begin = self.position if most is None else max(self.position, size - most)
            if begin < size:
                if self.position == 0:
                    begin, header = _newest_run(file, begin, size)
                    self.ranks = int(header[1]) if header is not None and header[1] else None
                    named = _UID.search(header[0]) if header is not None else None
                    self.uid = named[1].decode() if named is not None else None
                if begin > self.position:
                    self.position, self._partial = begin, b""
                file.seek(begin)
                while data := file.read(min(_PART_BYTES, size - self.position)):
                    self.position += len(data)
                    yield from self._finished(data)
        if over and self._partial:
            last, self._partial = self._partial, b""
            yield _log_line(last)

    def _finished(self, data: bytes) -> Iterator[str]:
        """A progress bar ends its lines with a carriage return only: each of its states may be of another rank."""
        lines = (self._partial + data).splitlines(keepends=True)
        # a carriage return may be the first half of an end of line
        self._partial = b"" if lines[-1].endswith(b"\n") or len(lines[-1]) > _LONGEST_LOG_LINE else lines.pop()
        return map(_log_line, lines)


def _log_line(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode(errors="replace")


def _newest_run(file: BinaryIO, begin: int, size: int) -> tuple[int, re.Match[bytes] | None]:
    """Where it begins, and its header: pods of the same name share a log, to which a later run of the job appends.
    Else `begin`, and the header at the beginning of the log.
    """
    end = size
    while end > begin:
        start = max(begin, end - _PART_BYTES)
        file.seek(max(begin, start - 1))
        # with the byte before the part, and all of a header that begins in it
        data = (b"\n" if start == begin else b"") + file.read(min(end + _HEADER_BYTES, size) - file.tell())
        headers = (found for found in _RUN_STARTS.finditer(data) if 0 < found.start() <= end - start)
        if whole := [found for found in headers if data[found.start() - 1] in b"\r\n"]:
            return start - 1 + whole[-1].end(), whole[-1]
        end = start
    file.seek(0)
    return begin, _RUN_STARTS.match(file.read(_HEADER_BYTES))


def _loss_files(shared: Shared, job: str) -> tuple[list[tuple[Path, int]], int]:
    """Those of the newest attempts with their sizes, and the sum of these."""
    folder = shared.logs(job) / "losses"
    paths = [folder / name for name in shared.names(folder) if name.endswith(".jsonl")][-_MOST_ATTEMPTS:]
    found = [(path, status.st_size) for path in paths if (status := shared.status(path)) is not None]
    return found, sum(size for _, size in found)


def _sampled(shared: Shared, path: Path, size: int, samples: int) -> Iterator[dict[str, Any]]:
    """The first line, which says what it voids, lines at even distances, and the last one."""
    with suppress(OSError, ValueError), shared.open(path) as file:
        for sample in range(samples):
            file.seek(size * sample // samples)
            lines = file.read(_LONGEST_LINE).split(b"\n")
            # a read begins in the middle of a line
            if found := json_object(lines[0] if sample == 0 else lines[min(1, len(lines) - 1)]):
                yield found
        file.seek(max(0, size - _LONGEST_LINE))
        for line in file.read(_LONGEST_LINE).splitlines()[-1:]:
            if found := json_object(line):
                yield found


def _snapshot(step: int, manifest: dict[str, Any]) -> SnapshotRow:
    files, time = manifest.get("files"), manifest.get("time")
    sizes = [item.get("bytes") for item in files.values() if isinstance(item, dict)] if isinstance(files, dict) else []
    attempt = manifest.get("attempt")
    return SnapshotRow(
        step=step,
        time=moment(time),
        kind=str(manifest.get("kind") or ""),
        attempt=attempt if isinstance(attempt, int) else None,
        size=sum(size for size in sizes if isinstance(size, int)) or None,
    )


def moment(seconds: object) -> datetime | None:
    """A time in seconds since the epoch."""
    if not isinstance(seconds, int | float) or not isfinite(seconds):
        return None
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(seconds, UTC)
    return None


def drawable(value: object) -> float | None:
    """A number that a chart can draw: sums and margins of such numbers are finite, too."""
    return float(value) if isinstance(value, int | float) and abs(value) <= _GREATEST else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _step_of(name: str) -> int:
    found = _SNAPSHOT.match(name)
    return int(found[1]) if found else -1
