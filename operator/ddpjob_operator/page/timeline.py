"""Where the time of a job went: its attempts on a time axis, and its seconds by activity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Goodput, Phase
from ddpjob_operator.core.values.conditions import FAILED
from ddpjob_operator.core.values.conditions import find as find_condition
from ddpjob_operator.local.observed import seconds_in_words
from ddpjob_operator.page.axis import Axis, Tick, time_ticks
from ddpjob_operator.page.list_view import tone_of
from ddpjob_operator.page.values import STOPPED, UNKNOWN, JobRecord

_MOST_ATTEMPTS = 12
_LEFT, _RIGHT, _ROW, _TOP = 74.0, 12.0, 26.0, 4.0
_CHARACTER = 7.2
"""Width of a character of a label, on average."""

_ACTIVITIES = {
    "training": "Training",
    "validating": "Validating",
    "saving": "Saving snapshots",
    "first_step": "First steps",
    "rendezvous": "Rendezvous",
    "initializing": "Initializers",
    "pulling": "Pulling images",
    "queued": "Queued",
    "recovering": "Recovering",
    "stalled": "Stalled",
    "unknown": "Unknown",
    "suspended": "Suspended",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. None as `end` is now."""

    number: int
    start: datetime
    end: datetime | None
    outcome: str
    tone: str
    losses: tuple[datetime, ...] = ()
    """Of pods that were replaced while the others went on."""


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt as a bar."""

    y: float
    x: float
    width: float
    attempt: Attempt
    title: str
    label: str
    label_x: float
    anchor: str
    """Of the label: `inside` the bar, `start` behind it, `end` before it, or empty where there is no room."""
    losses: tuple[float, ...] = ()
    """Where on the axis pods were lost."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Attempts in the units of the viewBox, the newest at the bottom."""

    width: float
    height: float
    left: float
    right: float
    bottom: float
    ticks: tuple[Tick, ...]
    bars: tuple[Bar, ...]
    earlier: int
    """Attempts that are not shown."""


@dataclass(frozen=True, slots=True)
class Share:
    """An activity with its part of the time."""

    key: str
    label: str
    seconds: float
    words: str
    percent: str
    x: float
    """Start and width in a bar of 1000."""
    width: float


def attempts_of(job: JobRecord, began: Mapping[int, datetime]) -> tuple[Attempt, ...]:
    """The attempts that are on record: those that failed, and the current one."""
    status = job.status
    found: list[Attempt] = []
    losses: dict[int, tuple[datetime, ...]] = {}
    for failure, following in zip_longest(status.failures, status.failures[1:]):
        if _is_survived(failure, following, status):
            losses[failure.attempt] = (*losses.get(failure.attempt, ()), failure.time)
            continue
        start = _start_of(failure.attempt, found, status, began) or failure.time
        lost = losses.get(failure.attempt, ())
        found.append(Attempt(failure.attempt, min(start, failure.time), failure.time, failure.reason, "bad", lost))
    recorded = {attempt.number for attempt in found}
    # attempts of which only their files are left
    for number, start in sorted(began.items()):
        if number not in recorded and number != status.attempt:
            ends = [at for later, at in began.items() if later > number]
            found.append(Attempt(number, start, min(ends, default=start), "ended", "still"))
    current = status.attempt_start_time or began.get(status.attempt) or status.start_time
    if status.attempt not in recorded and current is not None:
        end = status.completion_time
        if end is None and job.phase in (STOPPED, UNKNOWN):
            end = max(current, status.goodput.last_update_time or current) if status.goodput else current
        lost = losses.get(status.attempt, ())
        found.append(Attempt(status.attempt, current, end, _outcome(job), tone_of(job.phase), lost))
    return tuple(sorted(found, key=lambda attempt: attempt.number))


def _start_of(
    attempt: int, found: list[Attempt], status: DDPJobStatus, began: Mapping[int, datetime]
) -> datetime | None:
    """When an attempt began after those that were `found`; None if that is not known. It is the end of the attempt
    before, as `attemptStartTime` of one that goes on: its fencing token is written later. The end of another one says
    nothing: the status has the newest failures only, and none of an attempt that was suspended.
    """
    if attempt == 0 and status.start_time is not None:
        return status.start_time
    return found[-1].end if found and found[-1].number == attempt - 1 else began.get(attempt)


def _is_survived(failure: FailureStatus, following: FailureStatus | None, status: DDPJobStatus) -> bool:
    """Whether the attempt of a failure went on (restart.scope Live)."""
    if following is not None and following.attempt == failure.attempt:
        return True
    ended = status.completion_time
    is_last = status.phase is Phase.FAILED and (ended is None or failure.time >= ended)
    return failure.attempt == status.attempt and not is_last


def timeline(attempts: tuple[Attempt, ...], now: datetime, width: float) -> Timeline | None:
    """The bars; None without an attempt."""
    if not attempts:
        return None
    shown = attempts[-_MOST_ATTEMPTS:]
    start = min(attempt.start for attempt in shown)
    whole = max(1.0, max(((attempt.end or now) - start).total_seconds() for attempt in shown))
    left, right = _LEFT, width - _RIGHT
    axis = Axis(0, whole, left, right)
    bars = []
    for index, attempt in enumerate(shown):
        end = attempt.end or now
        x, x_end = axis.at((attempt.start - start).total_seconds()), axis.at((end - start).total_seconds())
        words = seconds_in_words((end - attempt.start).total_seconds())
        label = f"{attempt.outcome}, {words}"
        bar_width = max(3.0, round(x_end - x, 1))
        label_x, anchor = _place(x, bar_width, _CHARACTER * len(label), left, right)
        title = f"attempt {attempt.number}: {attempt.start:%Y-%m-%d %H:%M:%S} UTC, {words}, {attempt.outcome}"
        if attempt.losses:
            title += f", live recoveries: {len(attempt.losses)}"
        losses = tuple(axis.at((time - start).total_seconds()) for time in attempt.losses)
        bars.append(Bar(_TOP + index * _ROW, x, bar_width, attempt, title, label, label_x, anchor, losses))
    bottom = _TOP + len(shown) * _ROW
    return Timeline(
        width=width,
        height=bottom + 36,
        left=left,
        right=right,
        bottom=bottom,
        ticks=time_ticks(whole, left, right, max(3, int(width / 130))),
        bars=tuple(bars),
        earlier=len(attempts) - len(shown),
    )


def _place(x: float, width: float, wanted: float, left: float, right: float) -> tuple[float, str]:
    """Where a label of a bar begins or ends, and how it is anchored."""
    if width > wanted + 16:
        return x + 8, "inside"
    if x + width + 7 + wanted <= right:
        return x + width + 7, "start"
    return (x - 7, "end") if x - 7 - wanted >= left else (x, "")


def shares(goodput: Goodput | None) -> tuple[Share, ...]:
    """Every activity that took time, in the order of the bar; empty if none did."""
    if goodput is None:
        return ()
    seconds = {name: max(0.0, float(getattr(goodput, name))) for name in _ACTIVITIES}
    whole = sum(seconds.values())
    if whole <= 0:
        return ()
    found, x = [], 0.0
    for name, label in _ACTIVITIES.items():
        if seconds[name] <= 0:
            continue
        part = seconds[name] / whole
        words = seconds_in_words(seconds[name]) if seconds[name] >= 10 else f"{seconds[name]:.1f}s"
        percent = f"{part:.0%}" if part >= 0.01 else "< 1%"
        found.append(Share(name, label, seconds[name], words, percent, round(x, 2), round(1000 * part, 2)))
        x += 1000 * part
    return tuple(found)


def _outcome(job: JobRecord) -> str:
    if job.phase == "Failed":
        failed = find_condition(job.status.conditions, FAILED)
        return failed.reason if failed is not None and failed.reason else "Failed"
    return job.phase
