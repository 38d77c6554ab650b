"""One job as values of its page: figures, charts, failures, in the order in which a person asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from math import isfinite

from ddpjob_operator.api.status import FailureStatus, Phase
from ddpjob_operator.core.ledger.summary import duration
from ddpjob_operator.follow.lines import Line
from ddpjob_operator.follow.why import Section
from ddpjob_operator.local.observed import seconds_in_words
from ddpjob_operator.page.charts import StepChart, Track, loss_chart, throughput_chart, track
from ddpjob_operator.page.list_view import Row, held_nodes, path_of, row_of, size_in_words
from ddpjob_operator.page.ranks import RanksView, ranks_view
from ddpjob_operator.page.timeline import Attempt, Share, Timeline, attempts_of, shares, timeline
from ddpjob_operator.page.values import Detail, EventRow, LogQuery, SnapshotRow

WIDE, NARROW = 1080.0, 340.0
_CHART_HEIGHT = 280.0
_MOST_EVENTS = 200
_TODO = "What to do"
_LOST = "Lost"
_ELSEWHERE = ("Progress", "Ranks", "Time", "Earlier failures", _LOST, _TODO)
"""Sections of the answer that other parts of the page show."""
_RANK_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name."""

    title: str
    value: str
    unit: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Both:
    """The same drawing for a wide and a narrow window: SVG scales its text with its width."""

    wide: StepChart | Track | Timeline
    narrow: StepChart | Track | Timeline


@dataclass(frozen=True, slots=True)
class FailureView:
    """A failure with what is known of it."""

    title: str
    message: str
    place: str
    when: str
    time: str
    lost: str
    advice: str
    log: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with the number of its rank's colour."""

    rank: int
    colour: int
    stamp: str
    text: str


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot in words."""

    step: int
    when: str
    time: str
    kind: str
    attempt: str
    size: str
    state: str


@dataclass(frozen=True, slots=True)
class EventView:
    """An event in words."""

    when: str
    time: str
    warning: bool
    about: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class JobView:
    """The page of one job."""

    row: Row
    headline: str
    has_failed: bool
    """Its failures then come before its progress."""
    has_nothing_to_draw: bool
    """It has failed before its first step."""
    answer_tone: str
    todo: tuple[str, ...]
    lost: tuple[str, ...]
    """What failures have cost."""
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    figures: tuple[Figure, ...]
    track: Both | None
    progress_words: str
    chart: Both | None
    throughput: Both | None
    timeline: Both | None
    shares: tuple[Share, ...]
    ranks: RanksView
    failures: tuple[FailureView, ...]
    snapshots: tuple[SnapshotView, ...]
    events: tuple[EventView, ...]
    more_events: int
    log: tuple[LogLine, ...]
    attempts: tuple[Attempt, ...]
    seconds: int


def job_view(detail: Detail) -> JobView:
    job, now = detail.job, detail.now
    status, row = job.status, row_of(job, now)
    attempts = attempts_of(job, detail.began)
    charts = [loss_chart(detail.course, width, _CHART_HEIGHT) for width in (WIDE, NARROW)]
    rates = [throughput_chart(detail.course, width, _CHART_HEIGHT) for width in (WIDE, NARROW)]
    lines = [timeline(attempts, now, width) for width in (WIDE, NARROW)]
    sections = [
        (section.title, _in_short(section))
        for section in detail.answer.sections
        if section.title not in _ELSEWHERE and not section.title.startswith("Last lines")
    ]
    return JobView(
        row=row,
        headline=_sentence(detail.answer.headline.removeprefix(f"{job.name}: ")),
        has_failed=job.phase == Phase.FAILED,
        has_nothing_to_draw=job.phase == Phase.FAILED and row.step is None,
        # what is said of a job that runs, or has succeeded, needs attention
        answer_tone="waiting" if row.tone in ("running", "good") else row.tone,
        todo=_lines_of(detail, _TODO),
        lost=_lines_of(detail, _LOST),
        sections=tuple(sections),
        figures=_figures(detail, row),
        track=_track(detail, row),
        progress_words=_progress_words(row),
        chart=_both(charts),
        throughput=_both(rates),
        timeline=_both(lines),
        shares=shares(status.goodput),
        ranks=ranks_view(detail.reports.ranks, now),
        failures=tuple(_failure(failure, detail) for failure in reversed(_failures(detail))),
        snapshots=tuple(_snapshot(snapshot, detail, index == 0) for index, snapshot in enumerate(detail.snapshots)),
        events=tuple(_event(event, now) for event in list(reversed(detail.events))[:_MOST_EVENTS]),
        more_events=max(0, len(detail.events) - _MOST_EVENTS),
        log=log_lines(detail.log),
        attempts=attempts,
        seconds=10 if status.is_final else 2,
    )


def _in_short(section: Section) -> tuple[str, ...]:
    """The lines of a section; of a cause its meaning, the first line of its message, and the place, which the failure
    has in full further down.
    """
    lines = section.lines
    return (*lines[:2], lines[-1]) if section.title.startswith("Cause") and len(lines) > 3 else lines


def _lines_of(detail: Detail, title: str) -> tuple[str, ...]:
    """A section of the answer."""
    return next((section.lines for section in detail.answer.sections if section.title == title), ())


def log_lines(lines: Iterable[Line]) -> tuple[LogLine, ...]:
    return tuple(LogLine(line.rank, line.rank % _RANK_COLOURS, _clock(line.stamp), line.text) for line in lines)


def log_path(namespace: str, name: str, query: LogQuery, rest: str = "/logs") -> str:
    """The page of these lines."""
    tail = query.tail if query.tail != LogQuery().tail else None
    given = {"rank": query.rank, "attempt": query.attempt, "tail": tail}
    wanted = "&".join(f"{key}={value}" for key, value in given.items() if value is not None)
    return path_of(namespace, name, f"{rest}?{wanted}" if wanted else rest)


def _figures(detail: Detail, row: Row) -> tuple[Figure, ...]:
    status, now = detail.job.status, detail.now
    progress, ratio = status.progress, status.goodput.ratio if status.goodput else None
    ran = (status.completion_time or now) - status.start_time if status.start_time else None
    speed = progress.samples_per_second if progress and detail.job.phase == Phase.RUNNING else None
    snapshot = status.snapshot or next(iter(detail.snapshots), None)
    newest = snapshot.step if snapshot else None
    saved = _ago(snapshot.time, now) if snapshot and snapshot.time else ""
    found = [
        Figure("Ends in", row.eta) if row.eta else None,
        _loss(detail, row),
        *(
            Figure(name.replace("_", " "), f"{value:.4g}")
            for name, value in sorted((progress.metrics or {}).items() if progress else ())
            if isfinite(value) and not name.startswith("epoch_")
        ),
        Figure("Throughput", f"{speed:,.0f}", "samples/s") if speed else None,
        Figure("Nodes", row.nodes, detail=_ranks(detail)) if row.nodes else None,
        Figure("Restarts", str(status.restarts), detail=f"{status.disruptions} disruptions" * bool(status.disruptions)),
        Figure("Goodput", f"{ratio:.0%}", detail="of the time") if ratio is not None else None,
        Figure("Newest snapshot", f"{newest:,}", detail=f"step, {saved}") if newest is not None else None,
        Figure("Time", seconds_in_words(ran.total_seconds())) if ran else None,
    ]
    return tuple(figure for figure in found if figure is not None)


def _loss(detail: Detail, row: Row) -> Figure | None:
    """That of the newest step in the chart: while a job trains, its status may have the loss of the step before."""
    newest = next((point for point in reversed(detail.course.kept) if point.loss is not None), None)
    if newest is not None:
        return Figure("Loss", f"{newest.loss:.4g}", detail=f"at step {newest.step:,}")
    return Figure("Loss", row.loss, detail="as last reported") if row.loss else None


def _ranks(detail: Detail) -> str:
    nodes, ranks = held_nodes(detail.job) or detail.job.nodes, detail.job.ranks_per_node
    count = nodes * ranks if nodes and ranks else None
    return f"{count} {'rank' if count == 1 else 'ranks'}" if count else ""


def _track(detail: Detail, row: Row) -> Both | None:
    if row.step is None:
        return None
    failures = [(failure.step, failure.reason) for failure in detail.job.status.failures if failure.step is not None]
    steps = [snapshot.step for snapshot in detail.snapshots]
    return Both(*(track(row.step, row.total, steps, failures, width) for width in (WIDE, NARROW)))


def _progress_words(row: Row) -> str:
    if row.step is None:
        return ""
    return f"step {row.step:,} of {row.total:,}" if row.total else f"step {row.step:,}"


def _both(drawings: list[StepChart | None] | list[Timeline | None]) -> Both | None:
    wide, narrow = drawings
    return Both(wide, narrow) if wide is not None and narrow is not None else None


def _failures(detail: Detail) -> list[FailureStatus]:
    """Those on record, the last one in full."""
    status = detail.job.status
    found = list(status.failures)
    if status.last_failure is not None:
        found = [*(item for item in found if item.time != status.last_failure.time), status.last_failure]
    return found


def _failure(failure: FailureStatus, detail: Detail) -> FailureView:
    place = [f"attempt {failure.attempt}"]
    if failure.rank is not None:
        place.append(f"rank {failure.rank}")
    place += [text for text in (failure.pod_name, failure.node_name and f"node {failure.node_name}") if text]
    if failure.step is not None:
        place.append(f"step {failure.step}")
    if failure.signal is not None:
        place.append(failure.signal)
    elif failure.exit_code is not None:
        place.append(f"exit code {failure.exit_code}")
    lost = ""
    if failure.step is not None and failure.snapshot_step is not None and failure.step > failure.snapshot_step:
        lost = f"{failure.step - failure.snapshot_step} steps after the snapshot of step {failure.snapshot_step}"
    return FailureView(
        title=failure.reason,
        message=failure.message,
        place=" · ".join(place),
        when=_ago(failure.time, detail.now),
        time=failure.time.isoformat(),
        lost=lost,
        advice=failure.advice,
        log=failure.log_tail,
    )


def _snapshot(snapshot: SnapshotRow, detail: Detail, newest: bool) -> SnapshotView:
    recorded, verified = detail.job.status.snapshot, snapshot.verified
    if verified is None and recorded is not None and recorded.step == snapshot.step:
        verified = recorded.verified
    state = {True: "verified", False: "not verified yet", None: ""}[verified]
    return SnapshotView(
        step=snapshot.step,
        when=_ago(snapshot.time, detail.now) if snapshot.time else "",
        time=snapshot.time.isoformat() if snapshot.time else "",
        kind=snapshot.kind,
        attempt="" if snapshot.attempt is None else str(snapshot.attempt),
        size=size_in_words(snapshot.size),
        state=", ".join(filter(None, ("newest" if newest else "", state))),
    )


def _event(event: EventRow, now: datetime) -> EventView:
    when, time = _ago(event.time, now), event.time.isoformat()
    return EventView(when, time, event.warning, event.about, event.reason, event.message, event.count)


def _ago(time: datetime, now: datetime) -> str:
    return f"{duration((now - time).total_seconds())} ago"


def _clock(stamp: str) -> str:
    """The time of day of a kubelet's stamp."""
    return stamp[11:19] if len(stamp) >= 19 and stamp[10] == "T" else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
