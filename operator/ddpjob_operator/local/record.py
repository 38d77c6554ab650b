"""The status of a run on this machine, on the shared folder: what a cluster has in its API server and its pods.

`ddpjob run` writes it at every change, so that phase, failures and goodput can be read during the run and after it, and
each second what the ranks report of themselves.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ddpjob_operator.core.ledger.ranks import furthest
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.trainer_report import LiveReport, TrainerReport

VERSION = 1
_SECONDS_BETWEEN_RANKS = 1.0
_MOST_PLACES = 256
"""Places of pods in the file: the newest."""


def status_file(shared: Path, job: str) -> Path:
    return shared / "logs" / job / "status.json"


def ranks_file(shared: Path, job: str) -> Path:
    return shared / "logs" / job / "ranks.json"


@dataclass(frozen=True, slots=True)
class PodPlace:
    """A place that a pod of this run had: the one in its name, and each that it was given later, since it was kept in a
    restart, or was a spare.
    """

    pod: str
    attempt: int
    node_rank: int


class StatusFile:
    """Rewrites the file when the status has changed. A folder that is full or away does not stop the run."""

    def __init__(self, shared: Path, job: Job) -> None:
        self._path = status_file(shared, job.name)
        self._created = datetime.now(UTC)
        self._written: tuple[dict[str, Any], list[dict[str, Any]]] | None = None

    def write(self, job: Job, places: Sequence[PodPlace] = ()) -> None:
        """The status, and which logs are those of this run, by place."""
        noted = [
            {"pod": place.pod, "attempt": place.attempt, "nodeRank": place.node_rank}
            for place in places[-_MOST_PLACES:]
        ]
        status = job.status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"internal"})
        if (status, noted) == self._written:
            return
        content = {
            "version": VERSION,
            "job": job.name,
            "uid": job.uid,
            "created": self._created.isoformat(),
            "nodes": job.spec.nodes,
            "procsPerNode": job.spec.ranks_per_node,
            "places": noted,
            "status": status,
        }
        with suppress(OSError):
            _replace(self._path, content)
            self._written = status, noted


class RanksFile:
    """The newest report of each rank of the newest attempt, also after its end. It is rewritten once a second."""

    def __init__(self, shared: Path, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = ranks_file(shared, job.name)
        self._uid, self._clock = job.uid, clock
        self._attempt = -1
        self._ranks: dict[int, dict[str, Any]] = {}
        self._throttling: dict[str, dict[str, Any]] = {}
        self._live: LiveReport | None = None
        self._written_at: float | None = None

    def on_report(self, pod: str, report: TrainerReport, now: datetime) -> None:
        """Take in what a launcher says of its ranks."""
        attempt = report.attempt or 0
        if attempt < self._attempt:
            return
        if attempt > self._attempt:
            self._attempt, self._ranks, self._throttling, self._live = attempt, {}, {}, None
        self._live = furthest([report.live, self._live])
        for rank in report.ranks:
            self._ranks[rank.rank] = {
                "rank": rank.rank,
                "pod": pod,
                "phase": rank.phase,
                "step": rank.step,
                "stepSeconds": rank.step_seconds,
                "dataSeconds": rank.data_seconds,
                "passesSeconds": rank.passes_seconds,
                "time": None
                if rank.age_seconds is None
                else (now - timedelta(seconds=rank.age_seconds)).isoformat(timespec="milliseconds"),
            }
        if (found := report.throttling) is not None:
            self._throttling[pod] = {
                "seconds": found.seconds,
                "periods": found.periods,
                "throttledPeriods": found.throttled_periods,
                "throttledSeconds": found.throttled_seconds,
            }
        if self._written_at is None or self._clock() - self._written_at >= _SECONDS_BETWEEN_RANKS:
            self.write()

    def write(self) -> None:
        """All that is known, if anything is."""
        if not self._ranks:
            return
        self._written_at = self._clock()
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        content = {
            "uid": self._uid,
            "attempt": self._attempt,
            "ranks": ranks,
            "throttling": self._throttling,
            "live": _live(self._live),
        }
        with suppress(OSError):
            _replace(self._path, {"version": VERSION, **content})


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write it whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_text(json.dumps(content) + "\n")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _live(report: LiveReport | None) -> dict[str, Any] | None:
    """As `/status` has it, with the world size."""
    if report is None:
        return None
    return {
        "ranks": report.ranks,
        "worldSize": report.world_size,
        "recoveries": {"lost": report.lost, "left": report.left, "joined": report.joined},
        "droppedSteps": report.dropped_steps,
        "last": None if report.last_seconds is None else {"seconds": report.last_seconds},
    }
