"""DDPJobs as rows of a table, with the columns of `kubectl get ddpjobs`, and one of them as a summary."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.ledger.summary import duration
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.follow.table import Column, printable, text_table, wrapped
from ddpjob_operator.local.observed import failure_in_words, progress_in_words, seconds_in_words, snapshot_in_words
from ddpjob_operator.runtime.client import Json
from ddpjob_operator.wire.jobs import parse_status, ranks_per_node
from ddpjob_operator.wire.objects import Object, parse_time

_COLUMNS = (
    Column("NAME"), Column("PHASE"), Column("NODES", 1), Column("PROGRESS", 5), Column("ETA", 3), Column("RESTARTS", 2),
    Column("REASON", 4), Column("AGE", 6),
)  # fmt: skip
_WIDE = (
    Column("ATTEMPT", 0), Column("LOSS", 0), Column("ACCURACY", 0), Column("GOODPUT", 0), Column("SNAPSHOT", 0),
    Column("QUEUE", 0),
)  # fmt: skip
_TITLE_WIDTH = 11


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    line: str
    over: bool
    """Whether the job has ended, so that the line may be dimmed."""


def newest_first(jobs: Iterable[Json]) -> list[Json]:
    """Jobs by their creation; those of one second by name."""
    by_name = sorted(jobs, key=lambda job: str(job["metadata"]["name"]))
    return sorted(by_name, key=lambda job: job["metadata"].get("creationTimestamp") or "", reverse=True)


def job_table(
    jobs: Iterable[Object], now: datetime, *, wide: bool = False, namespaces: bool = False, width: int | None = None
) -> tuple[str, list[Row]]:
    """The heading, and a row for each job in their order."""
    shown = list(jobs)
    statuses = [parse_status(job.get("status") or {}) for job in shown]
    columns = (*((Column("NAMESPACE"),) if namespaces else ()), *_COLUMNS, *(_WIDE if wide else ()))
    cells = [
        [
            *((job["metadata"].get("namespace") or "",) if namespaces else ()),
            *_cells(job, status, now),
            *(_wide_cells(job, status) if wide else ()),
        ]
        for job, status in zip(shown, statuses, strict=True)
    ]
    heading, *lines = text_table(columns, cells, width)
    return heading, [Row(line, status.is_final) for line, status in zip(lines, statuses, strict=True)]


def summary_lines(job: Object, now: datetime, width: int | None = None) -> list[str]:
    """A job in a few lines: what a person asks first, in words. None as `width` wraps none of them."""
    metadata, spec = job["metadata"], job.get("spec") or {}
    status = parse_status(job.get("status") or {})
    code = str((spec.get("code") or {}).get("sha256") or "")
    rows = [
        ("Namespace", metadata.get("namespace") or ""),
        ("Created", _when(parse_time(metadata.get("creationTimestamp")), now)),
        ("Time", _time(status, now)),
        ("Nodes", _nodes(job, status)),
        ("Progress", _progress(status, now)),
        ("Snapshot", _snapshot(status, now)),
        ("Goodput", _goodput(status)),
        ("Attempt", _attempt(status)),
        ("Program", _program(spec)),
        ("Code", f"{code[:12]}; ddpjob code {metadata['name']} gets it back" if code else ""),
        ("Image", str(spec.get("image") or "")),
        ("Queue", _queue(spec)),
        ("Volume", volume_in_words(metadata["name"], spec)),
        *(("Condition", f"{item.type}: {item.reason}: {item.message}") for item in _attention(status)),
        ("Failure", failure_in_words(status.last_failure) if status.last_failure is not None else ""),
        ("Advice", status.last_failure.advice if status.last_failure is not None else ""),
    ]
    said = [(title, printable(text)) for title, text in rows if text]
    lines = wrapped([f"{metadata['name']}: {_headline(metadata, status)}"], width, "  ")
    for title, text in said:
        lines += wrapped([f"  {title:<{_TITLE_WIDTH}}{text}"], width, " " * (_TITLE_WIDTH + 2))
    return lines


def volume_in_words(name: str, spec: Object) -> str:
    """The claim with the job's files, and whether it outlives the job."""
    shared = spec.get("shared") or {}
    if claim := shared.get("claimName"):
        return f"claim {claim}, which is yours"
    ends = "deleted with the job" if shared.get("retain") is False else "kept when the job is deleted"
    return f"claim {pvc_name(name)}, {ends}"


def _cells(job: Object, status: DDPJobStatus, now: datetime) -> list[str]:
    metadata, columns = job["metadata"], status.summary
    created = parse_time(metadata.get("creationTimestamp"))
    return [
        metadata["name"],
        "Terminating" if "deletionTimestamp" in metadata else str(status.phase or ""),
        (columns.nodes or "") if columns else "",
        (columns.progress or "") if columns else "",
        _left(status, now),
        str(status.restarts),
        printable((columns.reason or "") if columns else ""),
        duration((now - created).total_seconds()) if created else "",
    ]


def _wide_cells(job: Object, status: DDPJobStatus) -> list[str]:
    progress, goodput = status.progress, status.goodput
    accuracy = ((progress.metrics or {}) if progress else {}).get("eval_accuracy")
    return [
        str(status.attempt),
        f"{progress.loss:.4g}" if progress and progress.loss is not None else "",
        f"{accuracy:.4g}" if accuracy is not None else "",
        f"{goodput.ratio:.0%}" if goodput and goodput.ratio is not None else "",
        str(status.snapshot.step) if status.snapshot else "",
        _queue(job.get("spec") or {}),
    ]


def _left(status: DDPJobStatus, now: datetime) -> str:
    eta = status.progress.eta if status.progress else None
    return duration((eta - now).total_seconds()) if status.phase is Phase.RUNNING and eta and eta > now else ""


def _headline(metadata: Any, status: DDPJobStatus) -> str:
    if "deletionTimestamp" in metadata:
        return "Terminating"
    if status.phase is None:
        return f"no operator has acted on it; ddpjob why {metadata['name']} says more"
    reason = status.summary.reason if status.summary else None
    return f"{status.phase}{f' ({printable(reason)})' if reason else ''}"


def _when(time: datetime | None, now: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC, {duration((now - time).total_seconds())} ago" if time else ""


def _time(status: DDPJobStatus, now: datetime) -> str:
    if status.start_time is None:
        return ""
    took = seconds_in_words(((status.completion_time or now) - status.start_time).total_seconds())
    return f"{took}, ended {_when(status.completion_time, now)}" if status.completion_time else f"{took} so far"


def _nodes(job: Object, status: DDPJobStatus) -> str:
    wanted, ranks = status.nodes.total or (job.get("spec") or {}).get("nodes") or 1, ranks_per_node(job)
    spares = f", {status.nodes.spares} standing by" if status.nodes.spares else ""
    ready = f"{status.nodes.ready} of {wanted} ready" if not status.is_final else f"{wanted}"
    return f"{ready}, {ranks} {'rank' if ranks == 1 else 'ranks'} each{spares}"


def _progress(status: DDPJobStatus, now: datetime) -> str:
    progress = status.progress
    return progress_in_words(progress, now) if progress is not None and progress.step is not None else ""


def _snapshot(status: DDPJobStatus, now: datetime) -> str:
    found = status.snapshot
    return f"{snapshot_in_words(found)}, {duration((now - found.time).total_seconds())} ago" if found else ""


def _goodput(status: DDPJobStatus) -> str:
    goodput = status.goodput
    return f"{goodput.ratio:.0%} of the time" if goodput is not None and goodput.ratio is not None else ""


def _attempt(status: DDPJobStatus) -> str:
    return f"{status.attempt}, restarts {status.restarts}, disruptions {status.disruptions}"


def _program(spec: Any) -> str:
    """What each rank runs, as a person would type it."""
    entrypoint = spec.get("entrypoint") or {}
    module = entrypoint.get("module")
    program = entrypoint.get("script") or (f"-m {module}" if module else "built-in trainer")
    return f"{program} {shlex.join(map(str, spec.get('args') or ()))}".strip()


def _queue(spec: Any) -> str:
    return printable(str((spec.get("scheduling") or {}).get("queue") or ""))


def _attention(status: DDPJobStatus) -> Sequence[Any]:
    return [item for item in status.conditions if item.type in cond.ATTENTION and item.status == "True"]
