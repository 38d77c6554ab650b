"""What a source has of jobs, the same for a folder and a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.ledger.ranks import NO_REPORTS, Reports
from ddpjob_operator.follow.lines import Line
from ddpjob_operator.follow.why import Answer
from ddpjob_operator.local.record import PodPlace
from ddpjob_operator.wire.links import Link

STOPPED = "Stopped"
"""Phase of a run on this machine that has ended before its job."""
UNKNOWN = "Unknown"
"""Phase of a job of which a folder has no status."""
TERMINATING = "Terminating"


class SourceError(Exception):
    """The source cannot be read. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job."""

    namespace: str
    name: str
    uid: str
    created: datetime | None
    phase: str
    """A phase of the API, or one of those above."""
    status: DDPJobStatus
    nodes: int | None = None
    ranks_per_node: int | None = None
    about: tuple[tuple[str, str], ...] = ()
    """Further properties: title and text."""
    links: tuple[Link, ...] = ()
    """That the job says of itself."""
    places: tuple[PodPlace, ...] = ()
    """Of `ddpjob run`: which logs are those of this run, by place."""


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The loss of one step."""

    step: int
    loss: float | None
    """None if it was not finite."""
    attempt: int
    samples_per_second: float | None = None
    """Of all ranks over the last steps; None if it is not on record."""


@dataclass(frozen=True, slots=True)
class Course:
    """The loss and the throughput over the steps."""

    kept: tuple[LossPoint, ...] = ()
    lost: tuple[LossPoint, ...] = ()
    """Steps that were trained again."""
    validation: tuple[LossPoint, ...] = ()
    note: str = ""
    """Where it is from, if it is not complete."""


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot. None is unknown."""

    step: int
    time: datetime | None
    kind: str = ""
    attempt: int | None = None
    size: int | None = None
    """Bytes of its files."""
    verified: bool | None = None


@dataclass(frozen=True, slots=True)
class PodRow:
    """A pod, or its log where the pod is gone."""

    name: str
    attempt: int
    node_rank: int | None
    """None for a spare."""
    state: str
    tone: str = ""
    """As of a phase; see `list_view.tone_of`."""
    node: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened."""

    time: datetime
    warning: bool
    about: str
    """The object, such as `pod digits-0-1`; empty for the job."""
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Command:
    """A command to copy."""

    purpose: str
    text: str


@dataclass(frozen=True, slots=True)
class Detail:
    """One job with all that its page shows."""

    job: JobRecord
    answer: Answer
    now: datetime
    course: Course = Course()
    pods: tuple[PodRow, ...] = ()
    reports: Reports = NO_REPORTS
    """What the ranks of the current attempt say."""
    snapshots: tuple[SnapshotRow, ...] = ()
    set_aside: tuple[str, ...] = ()
    """Snapshots that did not verify, with the reason."""
    events: tuple[EventRow, ...] = ()
    """Oldest first."""
    stacks: tuple[tuple[str, str], ...] = ()
    """Stacks of ranks that stalled: name of the file, and what is in it."""
    log: tuple[Line, ...] = ()
    log_elsewhere: Command | None = None
    """What prints logs that are not shown, and why they are not."""
    commands: tuple[Command, ...] = ()
    began: Mapping[int, datetime] = field(default_factory=dict)
    """When attempts began, as far as it is known."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines of a log are wanted. None is all."""

    rank: int | None = None
    attempt: int | None = None
    """The newest, if None."""
    tail: int = 500
    """Of each pod."""


class Scope(StrEnum):
    """What kind of a source it is."""

    FOLDER = "folder"
    CLUSTER = "cluster"


class Source(Protocol):
    """Where jobs are read. Nothing here changes any."""

    @property
    def scope(self) -> Scope: ...

    @property
    def where(self) -> str:
        """Such as a path, or a context and its namespace."""
        ...

    @property
    def start_command(self) -> str:
        """How a first job is started."""
        ...

    async def jobs(self) -> Sequence[JobRecord]:
        """All jobs, in any order.

        Raises:
            SourceError: the source cannot be read.
        """
        ...

    async def detail(self, namespace: str, name: str) -> Detail | None:
        """One job; None if there is none.

        Raises:
            SourceError: the source cannot be read.
        """
        ...

    async def log(self, namespace: str, name: str, query: LogQuery) -> Sequence[Line] | None:
        """Lines that there are now; None if there is no such job."""
        ...

    def follow(self, namespace: str, name: str, query: LogQuery) -> AsyncGenerator[Line]:
        """The same, and then each line as it comes, until the job has ended.

        Raises:
            SourceError: the source cannot be read any more.
        """
        ...
