"""The list of jobs as values of the page: rows, filters and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from urllib.parse import quote, urlencode

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.ledger.summary import duration, reason_of
from ddpjob_operator.page.values import JobRecord

TONES: Mapping[str, str] = {
    Phase.RUNNING: "running",
    Phase.SUCCEEDED: "good",
    Phase.FAILED: "bad",
    Phase.PENDING: "waiting",
    Phase.STARTING: "waiting",
    Phase.RESTARTING: "waiting",
    Phase.SUSPENDED: "still",
}
"""The colour and the symbol of each phase; others are `still`."""
_FEW = 5
_ORDER = ("Running", "Restarting", "Starting", "Pending", "Suspended", "Stopped", "Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class Row:
    """One job of the list."""

    namespace: str
    name: str
    href: str
    phase: str
    tone: str
    nodes: str
    step: int | None
    total: int | None
    percent: int | None
    eta: str
    loss: str
    restarts: int
    reason: str
    age: str
    created: str
    """RFC 3339."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What the page was asked for. Empty is all."""

    phase: str = ""
    namespace: str = ""
    name: str = ""
    """A part of the name."""

    def admits(self, job: JobRecord) -> bool:
        return (
            self.phase in ("", job.phase) and self.namespace in ("", job.namespace) and self.name in job.name
        )  # fmt: skip

    def href(self, phase: str) -> str:
        """This filter with another phase."""
        given = {"phase": phase, "namespace": self.namespace, "name": self.name}
        query = urlencode({name: value for name, value in given.items() if value})
        return f"/?{query}" if query else "/"

    @property
    def is_set(self) -> bool:
        return bool(self.phase or self.namespace or self.name)


@dataclass(frozen=True, slots=True)
class Choice:
    """A phase to filter by."""

    label: str
    count: int
    href: str
    tone: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class ListView:
    """The page `/`."""

    rows: tuple[Row, ...]
    total: int
    choices: tuple[Choice, ...]
    namespaces: tuple[str, ...]
    filter: Filter
    seconds: int
    """Between two looks: longer for a long list."""

    @property
    def is_filterable(self) -> bool:
        """Whether there is something to search."""
        return self.total > _FEW or self.filter.is_set


def tone_of(phase: str) -> str:
    return TONES.get(phase, "still")


def list_view(jobs: Sequence[JobRecord], wanted: Filter, now: datetime) -> ListView:
    """The jobs that the filter admits, the newest first."""
    in_namespace = [job for job in jobs if Filter("", wanted.namespace, wanted.name).admits(job)]
    counts = Counter(job.phase for job in in_namespace)
    phases = sorted({*counts, wanted.phase} - {""}, key=lambda phase: _ORDER.index(phase) if phase in _ORDER else 99)
    choices = [Choice("All", len(in_namespace), wanted.href(""), "", not wanted.phase)]
    choices += [
        Choice(phase, counts[phase], wanted.href(phase), tone_of(phase), phase == wanted.phase) for phase in phases
    ]
    return ListView(
        rows=tuple(row_of(job, now) for job in newest_first(in_namespace) if wanted.admits(job)),
        total=len(jobs),
        choices=tuple(choices),
        namespaces=tuple(sorted({job.namespace for job in jobs})),
        filter=wanted,
        seconds=2 if len(jobs) <= 100 else 10,
    )


def newest_first(jobs: Iterable[JobRecord]) -> list[JobRecord]:
    """Those of one second by name."""
    by_name = sorted(jobs, key=lambda job: (job.namespace, job.name))
    return sorted(by_name, key=lambda job: job.created.timestamp() if job.created else 0.0, reverse=True)


def row_of(job: JobRecord, now: datetime) -> Row:
    status = job.status
    progress = status.progress
    step, total = (progress.step, progress.total_steps) if progress else (None, None)
    return Row(
        namespace=job.namespace,
        name=job.name,
        href=path_of(job.namespace, job.name),
        phase=job.phase,
        tone=tone_of(job.phase),
        nodes=_nodes(job),
        step=step,
        total=total,
        percent=percent_of(step, total),
        eta=eta_of(job, now),
        loss=f"{progress.loss:.4g}" if progress and progress.loss is not None and isfinite(progress.loss) else "",
        restarts=status.restarts,
        reason=_reason(job, reason_of(status) or ""),
        age=duration((now - job.created).total_seconds()) if job.created else "",
        created=job.created.isoformat() if job.created else "",
    )


def path_of(namespace: str, name: str, rest: str = "") -> str:
    return f"/jobs/{quote(namespace, safe='')}/{quote(name, safe='')}{rest}"


def size_in_words(count: int | None) -> str:
    """Bytes, such as `1.2 GB`."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:  # what rounds to 1000 is 1 of the next unit
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if value < 999.5 else f"{value:.0f} TB"


def percent_of(step: int | None, total: int | None) -> int | None:
    return min(100, max(0, 100 * step // total)) if total and step is not None else None


def eta_of(job: JobRecord, now: datetime) -> str:
    eta = job.status.progress.eta if job.status.progress else None
    return duration((eta - now).total_seconds()) if job.phase == Phase.RUNNING and eta and eta > now else ""


def _reason(job: JobRecord, reason: str) -> str:
    """The reason, if it says more than the phase."""
    return "" if job.phase != job.status.phase or reason == job.phase or tone_of(job.phase) == "good" else reason


def held_nodes(job: JobRecord) -> int:
    """The size of its gang now, which of an elastic job may differ from that of the spec; 0 where it has none."""
    return 0 if job.status.is_final or job.phase != job.status.phase else job.status.nodes.total


def _nodes(job: JobRecord) -> str:
    held = held_nodes(job)
    return f"{job.status.nodes.ready}/{held}" if held else str(job.nodes or job.status.nodes.total or "")
