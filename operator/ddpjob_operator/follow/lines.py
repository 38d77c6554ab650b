"""The lines that ranks print: how one is parsed, and which of a job's are wanted."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from ddpjob_operator.core.values.observed import NO_ATTEMPT, PodPhase, PodView
from ddpjob_operator.follow.table import visible

T = TypeVar("T")

STAMPED = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) ")
"""How a line of a container's log begins, with `timestamps=true`. What does not is the kubelet's own, or was cut."""
_LOCAL_RANK = re.compile(r"\[local rank (\d{1,7})\] ")
_LOCAL_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?([+-]\d\d:\d\d)")
_MOST_NAMED = 10
"""Node ranks in a note."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines are wanted. None means all."""

    node: int | None = None
    """Node rank."""
    rank: int | None = None
    """Global rank."""
    attempt: int | None = None
    """The newest that has pods, if None."""
    pattern: re.Pattern[str] | None = None
    tail: int | None = None
    """The last so many of the wanted lines of each pod."""
    since_seconds: int | None = None

    @property
    def is_selective(self) -> bool:
        """Whether lines are chosen by what is in them, which the kubelet cannot do."""
        return self.rank is not None or self.pattern is not None

    def is_before(self, attempt: int) -> bool:
        """Whether an attempt is named that is over once the job is in this one."""
        return self.attempt is not None and self.attempt < attempt

    def node_of(self, ranks_per_node: int) -> int | None:
        """The only node rank with lines that are wanted."""
        return self.node if self.rank is None else self.rank // ranks_per_node

    def query(self) -> dict[str, str]:
        """The part of it that the kubelet answers."""
        tail = None if self.is_selective else self.tail
        limits = {"tailLines": tail, "sinceSeconds": self.since_seconds}
        return {name: str(value) for name, value in limits.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a rank: its time stamp of the kubelet (RFC 3339, in UTC), where it is from, and its text.

    One from a volume has an empty stamp and, of a job that is gone, node rank 0.
    """

    stamp: str
    node: int
    rank: int
    text: str

    def __str__(self) -> str:
        return f"[rank {self.rank}] {self.text}"


@dataclass(slots=True)
class SoFar:
    """Up to where a log was read, for the lines that come again with a new connection.

    A stamp does not tell lines apart: CRI-O gives the same one to all lines that it has read at once.
    """

    stamp: str = ""
    """Of the last line; empty before the first."""
    _texts: list[str] = field(default_factory=list)
    """Of the lines with that stamp."""
    _again: deque[str] | None = None
    """Texts of lines with that stamp that are still to come again; None once a line has come that is new."""

    def connected(self) -> None:
        """From the stamp of the last line on: that one, and maybe some before it, come again."""
        self._again = deque(self._texts)

    def is_new(self, stamp: str, text: str) -> bool:
        """Whether the next line, which has this stamp and text, is new; then it is the last one."""
        if self._again is not None:
            if stamp < self.stamp:
                return False
            if stamp == self.stamp and self._again:
                if text == self._again[0]:  # else it is one that the number of last lines has left out
                    self._again.popleft()
                return False
            self._again = None
        if stamp != self.stamp:
            self._texts.clear()
        self._texts.append(text)
        self.stamp = stamp
        return True


def parse_line(raw: str, node: int, ranks_per_node: int) -> Line:
    """A line of a pod's log with `timestamps=true`. Lines of the first rank of a node have no prefix."""
    stamp, _, text = raw.partition(" ")
    # of progress bars, which go back to the beginning of the line, the last state: ranks may share a line
    text = text.rstrip("\r").rpartition("\r")[2]
    found = _LOCAL_RANK.match(text)
    local_rank = int(found[1]) if found else 0
    text = text[found.end() :] if found else text
    return Line(in_utc(stamp), node, node * ranks_per_node + local_rank, visible(text))


def in_utc(stamp: str) -> str:
    """The time stamp of a line, so that all can be compared as text. Container runtimes write the local time of their
    node, in which an hour comes twice where clocks are set back.
    """
    found = _LOCAL_TIME.fullmatch(stamp)
    if found is None:
        return stamp
    seconds, fraction, offset = found.groups()
    return f"{datetime.fromisoformat(seconds + offset).astimezone(UTC):%Y-%m-%dT%H:%M:%S}{fraction or ''}Z"


def is_wanted(line: Line, wanted: Wanted) -> bool:
    """Whether a line of a wanted pod is shown."""
    if wanted.rank is not None and line.rank != wanted.rank:
        return False
    return wanted.pattern is None or wanted.pattern.search(line.text) is not None


def pods_of(pods: Iterable[PodView], wanted: Wanted, ranks_per_node: int) -> list[PodView]:
    """The pods whose logs have lines that are wanted, by node rank."""
    placed = [pod for pod in pods if pod.attempt != NO_ATTEMPT and pod.node_rank is not None]
    newest = max((pod.attempt for pod in placed), default=0)
    attempt = newest if wanted.attempt is None else wanted.attempt
    node = wanted.node_of(ranks_per_node)
    found = [pod for pod in placed if pod.attempt == attempt and node in (None, pod.node_rank)]
    return sorted(found, key=lambda pod: pod.node_rank or 0)


def nodes_without_log(pods: Iterable[PodView], read: Iterable[PodView], nodes: int, name: str) -> str | None:
    """Which of `nodes` node ranks have no line among those of the pods that could be `read`, and where to look."""
    waiting = {pod.node_rank for pod in pods if pod.phase is PodPhase.PENDING}
    gone = sorted(set(range(nodes)) - {pod.node_rank for pod in read} - waiting)
    if not gone:
        return None
    ranks = f"node rank{'' if len(gone) == 1 else 's'} {', '.join(map(str, gone[:_MOST_NAMED]))}"
    which = f"{ranks} any more" if len(gone) <= _MOST_NAMED else f"{len(gone)} nodes any more, such as {ranks}"
    return f"no log of {which}; ddpjob logs {name} --on-volume reads it from the job's volume"


def last_of(lines: Iterable[T], wanted: Wanted) -> Iterable[T]:
    """Of the wanted lines of a pod, those that `tail` leaves. No more than these are held at a time."""
    return lines if wanted.tail is None else deque(lines, maxlen=min(wanted.tail, sys.maxsize))
