"""What a trainer says of itself: its answer to `/status` while it lives, its termination message at its end
(docs/contracts.md sections 4 and 5).

Both come out of a user's container, where any process may have written them. They are parsed once, here: a field is of
its type or unknown, numbers are such as JSON and an API server can carry, texts and lists are bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from ddpjob_operator.api.status import SnapshotStatus

VERSION = 1
LARGEST_INTEGER = 2**63 - 1
"""Of an integer in a status."""
MOST_ITEMS = 64
"""Of a list, or of the metrics."""

_MOST_SECONDS = 1e9  # 30 years; sums of such numbers are still exact to the millisecond
_LONGEST_NAME = 64
_LONGEST_TEXT = 4096
_MESSAGES_KNOWN = 2048
"""More than the largest gang has pods."""
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_SIGNAL = re.compile(r"SIG[A-Z0-9]{2,12}")
_DECODER = json.JSONDecoder()
_TEXTS = ("message", "exception", "cut", "traceback")
"""Fields of a termination message that say something without their end."""
_MEMBER = re.compile(r'[{,]\s*"(\w{1,64})":\s*')
"""How a member of an object begins, before its value."""
_CUT_TEXT = re.compile(r'("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z')
"""A text without its end, and an escape without its end."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """How far one rank of the node is."""

    rank: int
    pid: int | None = None
    step: int | None = None
    phase: str = ""
    age_seconds: float | None = None
    """Since its last progress."""
    step_seconds: float | None = None
    """Median of the last steps."""
    data_seconds: float | None = None
    """Median of what they waited for data."""
    passes_seconds: float | None = None
    """Median of its own forward and backward passes, the wait for other ranks left out."""


@dataclass(frozen=True, slots=True)
class Throttling:
    """What the CPU limit of a pod did lately."""

    seconds: float
    """How long that time is."""
    periods: int
    """Of the kernel's scheduler, in which the pod ran; at least 1."""
    throttled_periods: int
    """In which it was stopped until their end."""
    throttled_seconds: float
    """How long it was stopped, added up over CPUs."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What live recovery has cost in this attempt."""

    ranks: int
    """That train now."""
    world_size: int
    """That are to train."""
    lost: int = 0
    """Recoveries after a rank was lost."""
    left: int = 0
    joined: int = 0
    dropped_steps: int = 0
    """Begun, put back and taken again."""
    last_seconds: float | None = None
    """Of the last recovery: from step to step."""


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """Why the last snapshot was not saved."""

    failures: int | None
    """Saves that failed in a row."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class NonFiniteLoss:
    """The loss is NaN or infinite: since which step, and in how many."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReport:
    """How far a trainer is. None, and what is empty, is unknown; moments are seconds since the epoch."""

    uid: str = ""
    attempt: int | None = None
    time: float | None = None
    """When it said so, by its own clock."""
    phase: str = ""
    phase_seconds: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Spent in each phase."""
    epoch: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    eta_seconds: float | None = None
    stop_seconds: float | None = None
    """Measured: what the ranks need to leave with a snapshot."""
    shutdown_seconds: float | None = None
    """What they have for it after SIGTERM."""
    resumed_from_step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    non_finite_loss: NonFiniteLoss | None = None
    snapshot: SnapshotStatus | None = None
    snapshot_problem: SnapshotProblem | None = None
    snapshots_set_aside: tuple[str, ...] = ()
    """Which snapshots did not verify, in words."""
    ranks: tuple[RankReport, ...] = ()
    throttling: Throttling | None = None
    """None without a CPU limit."""
    live: LiveReport | None = None
    """None without live recovery."""

    def is_of(self, uid: str, attempt: int) -> bool:
        """Whether it is about this attempt of this very job, and not of an earlier job of the same name."""
        return (self.uid, self.attempt) == (uid, attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationReport(TrainerReport):
    """How a trainer ended."""

    reason: str = "Failed"
    """One word: it becomes a condition's reason."""
    message: str = ""
    rank: int | None = None
    """The rank that failed first on this node."""
    signal: str = ""
    """Name of the signal that ended that rank."""
    exception: str = ""
    traceback: str = ""
    cut: str = ""
    """What ranks that succeeded had left at work, and was ended before it was done."""


def read_status(text: str | bytes) -> TrainerReport | None:
    """An answer of `/status`, or None if it is none of version 1."""
    given = _load(text)
    return None if given is None else TrainerReport(**_progress(given))


def read_termination(text: str) -> TerminationReport | None:
    """A termination message, or None if the text is something else. One that the kubelet has cut has the fields before
    the cut.
    """
    given = _load(text) or _before_the_cut(text)
    if given is None:
        return None
    reason, signal = _text(given.get("reason")), _text(given.get("signal"))
    return TerminationReport(
        **_progress(given),
        reason=reason if _REASON.fullmatch(reason) else "Failed",
        message=_text(given.get("message")),
        rank=_integer(given.get("rank")),
        signal=signal if _SIGNAL.fullmatch(signal) else "",
        exception=_text(given.get("exception")),
        traceback=_text(given.get("traceback")),
        cut=_text(given.get("cut")),
    )


@lru_cache(maxsize=_MESSAGES_KNOWN)
def attempt_of(text: str) -> int | None:
    """The attempt that a termination message names, or None. A look at a job asks this of each pod again and again."""
    said = read_termination(text)
    return None if said is None else said.attempt


def _load(text: str | bytes) -> dict[str, Any] | None:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):  # nothing is taken for granted, not even its depth
        return None
    return given if isinstance(given, dict) and given.get("version") == VERSION else None


def _before_the_cut(text: str) -> dict[str, Any] | None:
    """The whole fields of a termination message that was cut, and the beginning of the text that was; None if the
    reason is not among them.

    The kubelet divides 12 KiB among the containers of a pod, however many webhooks have added.
    """
    found: dict[str, Any] = {}
    position = 0
    while (member := _MEMBER.match(text, position)) is not None:
        try:
            value, position = _DECODER.raw_decode(text, member.end())
        except (ValueError, RecursionError):
            cut = _CUT_TEXT.match(text, member.end()) if member[1] in _TEXTS else None
            if cut is not None:
                # the kubelet counts bytes: half a character has become a replacement
                found[member[1]] = json.loads(f'{cut[1]}"').rstrip("\ufffd") + "…"
            break
        if isinstance(value, int | float) and text[position : position + 1] not in (",", "}"):
            break  # more digits may have followed
        found[member[1]] = value
    return found if found.get("version") == VERSION and "reason" in found else None


def _progress(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that both forms share."""
    return {
        "uid": _text(given.get("uid")),
        "attempt": _integer(given.get("attempt")),
        "time": _finite(given.get("time")),
        "phase": _text(given.get("phase"), _LONGEST_NAME),
        "phase_seconds": _seconds(given.get("phaseSeconds")),
        "seconds": {name: number for name, number in _numbers(given.get("seconds")) if 0 <= number <= _MOST_SECONDS},
        "epoch": _integer(given.get("epoch")),
        "step": _integer(given.get("step")),
        "total_steps": _integer(given.get("totalSteps")),
        "loss": _finite(given.get("loss")),
        "samples_per_second": _finite(given.get("samplesPerSecond")),
        "eta_seconds": _seconds(given.get("etaSeconds")),
        "stop_seconds": _seconds(given.get("stopSeconds")),
        "shutdown_seconds": _seconds(given.get("shutdownSeconds")),
        "resumed_from_step": _integer(given.get("resumedFromStep")),
        "metrics": dict(_numbers(given.get("metrics"))),
        "non_finite_loss": _non_finite_loss(_object(given.get("nonFiniteLoss"))),
        "snapshot": _snapshot(_object(given.get("snapshot"))),
        "snapshot_problem": _snapshot_problem(given.get("snapshotProblem")),
        "snapshots_set_aside": tuple(_set_aside(given.get("snapshotsSetAside"))),
        "ranks": tuple(_ranks(given.get("ranks"))),
        "throttling": read_throttling(given.get("throttling")),
        "live": read_live(given.get("live"), given.get("worldSize")),
    }


def _non_finite_loss(given: Mapping[str, Any]) -> NonFiniteLoss | None:
    step, steps = _integer(given.get("step")), _integer(given.get("steps"))
    return None if step is None or steps is None else NonFiniteLoss(step, steps)


def _snapshot(given: Mapping[str, Any]) -> SnapshotStatus | None:
    step, seconds = _integer(given.get("step")), _finite(given.get("time"))
    time = moment(seconds) if seconds is not None else None
    if step is None or time is None:
        return None
    return SnapshotStatus(step=step, time=time, verified=given.get("verified") is True)


def _snapshot_problem(given: Any) -> SnapshotProblem | None:
    if not isinstance(given, dict):
        return None
    return SnapshotProblem(_integer(given.get("failures")), _text(given.get("message")))


def _set_aside(given: Any) -> Iterator[str]:
    for item in _items(given, newest=True):
        if message := _text(_object(item).get("message")):
            yield message


def _ranks(given: Any) -> Iterator[RankReport]:
    for item in map(_object, _items(given)):
        if (rank := _integer(item.get("rank"))) is not None:
            yield RankReport(
                rank,
                pid=_integer(item.get("pid")),
                step=_integer(item.get("step")),
                phase=_text(item.get("phase"), _LONGEST_NAME),
                age_seconds=_seconds(item.get("ageSeconds")),
                step_seconds=_seconds(item.get("stepSeconds")),
                data_seconds=_seconds(item.get("dataSeconds")),
                passes_seconds=_seconds(item.get("passesSeconds")),
            )


def read_throttling(given: Any) -> Throttling | None:
    """That part of the answer; None if it is not whole, or nothing ran."""
    item = _object(given)
    seconds, stopped_seconds = _seconds(item.get("seconds")), _seconds(item.get("throttledSeconds"))
    periods, stopped = _integer(item.get("periods")), _integer(item.get("throttledPeriods"))
    if seconds is None or stopped_seconds is None or not periods or stopped is None or stopped > periods:
        return None
    return Throttling(seconds, periods, stopped, stopped_seconds)


def read_live(given: Any, world_size: Any) -> LiveReport | None:
    """That part of the answer; None if it is not whole."""
    item = _object(given)
    counted = _object(item.get("recoveries"))
    numbers = (item.get("ranks"), world_size, *map(counted.get, ("lost", "left", "joined")), item.get("droppedSteps"))
    known = [number for number in map(_integer, numbers) if number is not None]
    if len(known) < len(numbers):
        return None
    ranks, size, lost, left, joined, dropped = known
    return LiveReport(ranks, size, lost, left, joined, dropped, _seconds(_object(item.get("last")).get("seconds")))


def _items(value: Any, *, newest: bool = False) -> list[Any]:
    if not isinstance(value, list):
        return []
    return value[-MOST_ITEMS:] if newest else value[:MOST_ITEMS]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    for name, found in list(_object(value).items())[:MOST_ITEMS]:
        if (number := _finite(found)) is not None and name.isprintable():
            yield name[:_LONGEST_NAME], number


def _text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    """The text, with a replacement for what is half a character: no status can carry that."""
    return value[:longest].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _integer(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= LARGEST_INTEGER else None


def _finite(value: Any) -> float | None:
    """The number, unless it is one that has no JSON: a loss that has diverged is NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _seconds(value: Any) -> float | None:
    number = _finite(value)
    return number if number is not None and 0 <= number <= _MOST_SECONDS else None


def moment(seconds: float) -> datetime | None:
    """Seconds since the epoch as a time, in whole seconds; None if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=0)
    except (ValueError, OverflowError, OSError):
        return None
