"""Volumes of jobs on a cluster, where they are mounted: what outlives pods and, with a time to live, the DDPJob.

Which folder is whose follows from the namespace, the claim and the name of a job, which the API server has. What is in
it is the job's, and not trusted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.follow.lines import Line
from ddpjob_operator.follow.why import Answer
from ddpjob_operator.page import files
from ddpjob_operator.page.folder import all_pod_logs, detail_of, event_rows, logs_of
from ddpjob_operator.page.list_view import size_in_words
from ddpjob_operator.page.records import record_of
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import Command, Detail, JobRecord, LogQuery, PodRow
from ddpjob_operator.runtime.paths import NAME

ALL = "*"
_CLAIM = re.compile(rf"({NAME.pattern})/({NAME.pattern})")
_MOST_LEFT = 200
_MOST_LINES = 40


@dataclass(frozen=True, slots=True)
class Left:
    """A job that is on a volume."""

    namespace: str
    claim: str
    name: str
    shared: Shared


@dataclass(frozen=True, slots=True)
class Volumes:
    """A mounted folder: the volume of one claim, or folders `<namespace>/<claim>` that are those of many."""

    root: Path
    claim: tuple[str, str] | None
    """Namespace and name; None for folders of many."""
    _known: dict[Path, tuple[float, JobRecord]] = field(default_factory=dict, compare=False)

    @classmethod
    def at(cls, folder: Path, claim: str) -> Volumes:
        """With `claim` as NAMESPACE/CLAIM, or `*` for folders of many.

        Raises:
            ValueError: one of them cannot be; the message says why.
        """
        found = _CLAIM.fullmatch(claim)
        if found is None and claim != ALL:
            raise ValueError(
                f"--volume-of {claim}: give NAMESPACE/CLAIM, or '*' for a folder <namespace>/<claim> of each"
            )
        if not folder.is_dir():
            raise ValueError(f"--shared {folder}: no such folder; name the one where the volume is mounted")
        namespace, _, name = claim.partition("/")
        return cls(folder.resolve(), None if found is None else (namespace, name))

    def of_job(self, namespace: str, name: str, spec: dict[str, Any]) -> Shared | None:
        """The part of the volume that a job of this spec sees; None if it is not here."""
        shared = spec.get("shared") or {}
        volume = self._volume(namespace, str(shared.get("claimName") or pvc_name(name)))
        if volume is None or NAME.fullmatch(name) is None:
            return None
        return _own(volume, name) if shared.get("scope") == "Job" else volume

    def left(self, namespace: str, name: str) -> Left | None:
        """A job that the API server does not have any more."""
        return next((found for found in self._all(namespace, name) if found.name == name), None)

    def all_left(self, namespace: str | None, known: Iterable[tuple[str, str]]) -> list[JobRecord]:
        """Jobs of the namespace (None: of all) on the volumes besides the known ones, the newest first."""
        there, newest = set(known), []
        for found in self._all(namespace):
            status = found.shared.status(found.shared.logs(found.name))
            if (found.namespace, found.name) not in there and status is not None:
                there.add((found.namespace, found.name))
                newest.append((status.st_mtime, found))
        newest.sort(key=lambda item: item[0], reverse=True)
        return [self._record(found) for _, found in newest[:_MOST_LEFT]]

    def detail_of(self, namespace: str, name: str, now: datetime) -> Detail | None:
        """The page of a job that the API server does not have any more."""
        found = self.left(namespace, name)
        if found is None:
            return None
        detail, claim = detail_of(found.shared, name, now), shlex.quote(found.claim)
        text = f"ddpjob logs {shlex.quote(name)} --claim {claim} -n {shlex.quote(namespace)}"
        return replace(
            detail,
            job=_of_volume(detail.job, found),
            answer=Answer(f"{name}: the DDPJob is gone; this is what its volume has", ()),
            commands=(Command("Print its logs", text),),
        )

    def _record(self, found: Left) -> JobRecord:
        """What the events say, read again when they have changed."""
        path = found.shared.logs(found.name) / "events.jsonl"
        status = found.shared.status(path)
        changed = status.st_mtime if status is not None else 0.0
        known = self._known.get(path)
        if known is None or known[0] != changed:
            known = self._known[path] = (changed, _of_volume(record_of(found.shared, found.name), found))
        while len(self._known) > 2 * _MOST_LEFT:
            del self._known[next(iter(self._known))]
        return known[1]

    def _all(self, namespace: str | None, name: str | None = None) -> Iterator[Left]:
        """Jobs with logs, of one name or of all."""
        for of, claim in self._claims(namespace):
            volume = self._volume(of, claim)
            if volume is None:
                continue
            names = [name] if name is not None else volume.folders(volume.root / "jobs")
            for job in filter(NAME.fullmatch, names):
                if volume.is_folder(_own(volume, job).logs(job)):
                    yield Left(of, claim, job, _own(volume, job))
            names = [name] if name is not None else volume.folders(volume.root / "logs")
            for job in filter(NAME.fullmatch, names):
                if volume.is_folder(volume.logs(job)):
                    yield Left(of, claim, job, volume)

    def _claims(self, namespace: str | None) -> Iterator[tuple[str, str]]:
        if self.claim is not None:
            if namespace in (None, self.claim[0]):
                yield self.claim
            return
        mount = Shared(self.root)
        for of in mount.folders(self.root) if namespace is None else [namespace]:
            if NAME.fullmatch(of):
                yield from ((of, claim) for claim in mount.folders(self.root / of))

    def _volume(self, namespace: str, claim: str) -> Shared | None:
        if self.claim is not None:
            return Shared(self.root) if (namespace, claim) == self.claim else None
        if not (NAME.fullmatch(namespace) and NAME.fullmatch(claim)):
            return None
        return Shared(self.root / namespace / claim, self.root)


def with_volume(detail: Detail, shared: Shared) -> Detail:
    """The page of a job with what its volume has: every step, all snapshots, and logs of pods that are gone."""
    job = detail.job
    events = files.events_of(shared, job.name)
    course = files.course_of(shared, job.name, events)
    snapshots, set_aside = files.snapshots_of(shared, job.name)
    there = {pod.name for pod in detail.pods}
    gone = [row for row in _gone_pods(shared, job) if row.name not in there]
    rows = (*detail.events, *event_rows((), events, job.created))
    return replace(
        detail,
        course=course if course.kept else detail.course,
        snapshots=tuple(snapshots) or detail.snapshots,
        set_aside=tuple(set_aside) or detail.set_aside,
        stacks=tuple(files.stacks_of(shared, job.name, job.created)),
        pods=(*detail.pods, *gone),
        events=tuple(sorted(rows, key=lambda row: row.time)),
        log=detail.log or tuple(log_of(shared, job, LogQuery(tail=max(4, _MOST_LINES // (job.nodes or 1))))),
        began=files.began_of(shared, job.name, job.uid),
    )


def log_of(shared: Shared, job: JobRecord, query: LogQuery) -> list[Line]:
    """What the pods of this job have printed, and not those of an earlier one of the name."""
    attempt = job.status.attempt if query.attempt is None else query.attempt
    return list(logs_of(shared, job.name, replace(query, attempt=attempt), job.uid).now())


def _gone_pods(shared: Shared, job: JobRecord) -> list[PodRow]:
    failed = {failure.pod_name: failure.reason for failure in job.status.failures}
    rows = []
    for path, attempt, node in all_pod_logs(shared, job.name):
        status = shared.status(path)
        # a log that nobody has written to since the job was created is of an earlier one of the name
        if status is None or attempt > job.status.attempt or not files.is_since(status.st_mtime, job.created):
            continue
        state, tone = failed.get(path.stem, "Gone"), "bad" if path.stem in failed else "still"
        rows.append(PodRow(path.stem, attempt, node, state, tone, "", f"log of {size_in_words(status.st_size)}"))
    return sorted(rows, key=lambda row: (-row.attempt, row.node_rank or 0))


def _own(volume: Shared, job: str) -> Shared:
    """What a job sees with `shared.scope: Job`."""
    return Shared(volume.root / "jobs" / job, volume.within or volume.root)


def _of_volume(record: JobRecord, found: Left) -> JobRecord:
    about = (("Volume", f"claim {found.claim}, which is left"),)
    return replace(record, namespace=found.namespace, about=about)
