"""What the ranks of a job print, of all its pods in one stream: as it is now, or as it comes until the job has ended.

The order within a pod is the pod's. Between pods it is that of the kubelets' time stamps where the logs are complete,
and that of arrival where they are followed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.failure.detect import is_stopping
from ddpjob_operator.core.values.names import TRAINER_CONTAINER
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.follow.lines import (
    STAMPED,
    Line,
    SoFar,
    Wanted,
    is_wanted,
    last_of,
    nodes_without_log,
    parse_line,
    pods_of,
)
from ddpjob_operator.follow.outage import Patient, seconds_to_next_look
from ddpjob_operator.follow.read import read_job, read_pods
from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.pods import parse_pod

SECONDS_BETWEEN_LOOKS = 1.0
LOGS_AT_ONCE = 64
"""Logs of pods that are read as they are, each over a connection of its own: a process may have 256 files open on some
systems, and 1,024 on most. Those that are followed are so all at once.
"""
LOOKS_FOR_THE_END = 10
"""So many looks in a row may find no new line of a log that has to end: the kubelet of a lost node does not answer."""
_NOT_YET = (400, 404)
"""Answers for a container that has not started, or a pod that is gone again."""


@dataclass(frozen=True, slots=True)
class JobLogs:
    """The logs of one job."""

    client: Client
    namespace: str
    name: str
    ranks_per_node: int
    wanted: Wanted
    most: int | None = None
    """Bytes of memory for the lines that there are now, of all pods together: earlier ones of a pod are left out."""
    uid: str | None = None
    """That of the job; else whichever has the name first."""
    _newest: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The stamp of the newest line by the uid of its pod, also of one that is not wanted."""
    _refused: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """The uids of pods whose logs may not be read."""
    _places: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The node rank by the uid of its pod, as of the last look: a pod that goes on may take another one."""

    async def now(self, note: Callable[[str], None] = lambda _: None) -> AsyncIterator[Line]:
        """Every line that the pods have now, by time; then a note if some of the job's nodes have none any more."""
        job = await read_job(self.client, self.namespace, self.name, self.uid)
        pods = pods_of(
            map(parse_pod, await read_pods(self.client, self.namespace, job)), self.wanted, self.ranks_per_node
        )
        most = None if self.most is None else self.most // max(1, len(pods))
        places = asyncio.Semaphore(LOGS_AT_ONCE)

        async def whole(pod: PodView) -> Iterable[Line] | None:
            async with places:
                return await self._whole(pod, most)

        logs = await asyncio.gather(*map(whole, pods))
        for line in heapq.merge(*(log for log in logs if log is not None), key=lambda line: line.stamp):
            yield line
        status = parse_status(job.get("status") or {})
        of_all = self.wanted.node is None and self.wanted.rank is None
        if of_all and pods and pods[0].attempt == status.attempt:
            read = [pod for pod, log in zip(pods, logs, strict=True) if log is not None]
            if said := nodes_without_log(pods, read, status.nodes.total, self.name):
                note(said)

    async def follow(self, say: Callable[[Line], None], note: Callable[[str], None]) -> bool:
        """Each line as it comes, of this attempt and of those that follow, until the job has ended; of an attempt that
        is named, until that one has.

        Then what is left of the logs is read: of a pod that has time to end, until it has ended; of others, as long as
        lines come. A pod of a lost node stays, and its log does not end. A log that ends while its pod goes on is read
        again from its last line on: where a kubelet is restarted, the API server ends it as if it were over.

        Returns:
            whether it succeeded.

        Raises:
            ApiError: there is no such job, it was deleted, the cluster refused, or gave no answer for five minutes.
        """
        streams: dict[str, _Stream] = {}
        attempt, is_over, patient = self.wanted.attempt, False, Patient(note)
        job_uid = self.uid
        clock = asyncio.get_running_loop().time
        looked = clock()
        try:
            while True:
                if not is_over:
                    job = await patient.read(read_job, self.client, self.namespace, self.name, job_uid)
                    job_uid = job["metadata"]["uid"]
                    status = parse_status(job.get("status") or {})
                found = await patient.read(read_pods, self.client, self.namespace, job)
                pods, pods_took = [parse_pod(pod) for pod in found], patient.took
                before, looked = looked, clock()
                is_over = status.is_final or self.wanted.is_before(status.attempt)
                moved = self._placed(pods)
                for pod in pods_of(pods, self.wanted, self.ranks_per_node):
                    stream = streams.get(pod.uid)
                    so_far = stream.cut_off(pod) if stream is not None and not is_over else None
                    if pod.phase is PodPhase.PENDING or (stream is not None and so_far is None):
                        continue
                    if self.wanted.attempt is None and attempt is not None and pod.attempt > attempt:
                        note(f"attempt {pod.attempt} begins")
                    attempt = max(pod.attempt, attempt or 0)
                    # a second more: the kubelet counts from when it is asked
                    newest = math.ceil(looked - before) + 1 if pod.uid in moved else None
                    reading = self._stream(pod, say, note, newest, so_far)
                    streams[pod.uid] = _Stream(pod.name, asyncio.create_task(reading, name=f"log of {pod.name}"))
                there = {pod.uid: pod for pod in pods}
                for uid, stream in streams.items():
                    if is_over or uid not in there:
                        stream.look(self._newest.get(uid, ""), there.get(uid), note)
                if not is_over:
                    await asyncio.sleep(seconds_to_next_look(pods_took, SECONDS_BETWEEN_LOOKS))
                elif await _have_ended(streams.values()):
                    return status.phase == "Succeeded"
        finally:
            for stream in streams.values():
                stream.task.cancel()
            await asyncio.gather(*(stream.task for stream in streams.values()), return_exceptions=True)

    def _placed(self, pods: Iterable[PodView]) -> set[str]:
        """Remember where each pod is now; the uids of those that were elsewhere at the last look."""
        moved = set[str]()
        for pod in pods:
            # what comes late of an attempt that is named is of the place that the pod had then
            if pod.node_rank is None or self.wanted.attempt not in (None, pod.attempt):
                continue
            if self._places.get(pod.uid, pod.node_rank) != pod.node_rank:
                moved.add(pod.uid)
            self._places[pod.uid] = pod.node_rank
        return moved

    async def _whole(self, pod: PodView, most: int | None = None) -> Iterable[Line] | None:
        """None if it has no log yet, or none any more."""
        kept, size = deque[Line](), 0
        try:
            async for line in self._lines(pod, **self.wanted.query()):
                kept.append(line)
                size += _memory_of(line)
                while (most is not None and size > most) or (
                    self.wanted.tail is not None and len(kept) > self.wanted.tail
                ):
                    size -= _memory_of(kept.popleft())
        except _Absent:
            return None
        return kept

    async def _stream(
        self,
        pod: PodView,
        say: Callable[[Line], None],
        note: Callable[[str], None],
        newest: int | None = None,
        so_far: SoFar | None = None,
    ) -> SoFar | None:
        """One pod's log to its end, all of it or from so many seconds ago on (`newest`): before, it had another place.
        With `so_far` what follows that.

        A connection that breaks is made again, from the last line on; that is said once until there is another line. A
        log that may not be read is asked for once, and the job is followed without it.

        Returns:
            up to where it was read; None if it may not be.
        """
        query, said_at = self.wanted.query(), None
        begins_late = self.wanted.tail is not None and self.wanted.is_selective
        if so_far is not None and (stamp := self._newest.get(pod.uid)):
            query, begins_late = {"sinceTime": stamp}, False
        elif newest is not None:
            query["sinceSeconds"] = str(min(newest, self.wanted.since_seconds or newest))
        so_far = so_far or SoFar()
        while True:
            try:
                if begins_late:
                    found = [line async for line in self._lines(pod, **query)]
                    for line in last_of(found, self.wanted):
                        say(line)
                    begins_late = False
                    for line in found:
                        so_far.is_new(line.stamp, line.text)
                    query = {"sinceTime": so_far.stamp} if found else query
                so_far.connected()
                async for line in self._lines(pod, follow="true", **query):
                    if so_far.is_new(line.stamp, line.text):
                        say(line)
                return so_far
            except _Absent:
                return so_far
            except ApiError as error:
                if error.lacks_right:
                    if not self._refused:
                        note(f"{in_words(error)}; logs that may not be read are not followed")
                    self._refused.add(pod.uid)
                    return None
                if so_far.stamp != said_at:
                    said_at = so_far.stamp
                    note(f"{pod.name}: {error.message}; connecting again")
                query = {"sinceTime": so_far.stamp} if so_far.stamp else query
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def _lines(self, pod: PodView, **query: str) -> AsyncIterator[Line]:
        path, is_there = f"{paths.pods(self.namespace)}/{pod.name}/log", False
        try:
            async for raw in self.client.lines(path, container=TRAINER_CONTAINER, timestamps="true", **query):
                if not STAMPED.match(raw):  # of the kubelet itself: the container's log is gone, maybe meanwhile
                    if is_there:
                        continue
                    raise _Absent
                is_there = True
                node = self._places.get(pod.uid, pod.node_rank or 0)
                line = parse_line(raw, node, self.ranks_per_node)
                self._newest[pod.uid] = max(self._newest.get(pod.uid, ""), line.stamp)
                if self.wanted.node_of(self.ranks_per_node) in (None, node) and is_wanted(line, self.wanted):
                    yield line
        except ApiError as error:
            if error.status in _NOT_YET:
                raise _Absent from None
            raise


@dataclass(eq=False, slots=True)
class _Stream:
    """The log of a pod that is followed."""

    name: str
    task: asyncio.Task[SoFar | None]
    newest: str = ""
    """The stamp of its newest line at the last look."""
    looks: int = 0
    """Looks in a row by which it should have ended, or brought a new line."""

    def cut_off(self, pod: PodView) -> SoFar | None:
        """Up to where the log was read if it has ended and the pod has not; else None."""
        has_ended = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if has_ended and pod.running else None

    def look(self, newest: str, pod: PodView | None, note: Callable[[str], None]) -> None:
        """At a log that has to end, and its newest line by now. One that does not end is given up.

        A pod that goes on prints for ever: after the end of its job, or in the next attempt. One that was asked to stop
        may be silent while it saves a snapshot.
        """
        goes_on = pod is not None and pod.running and not pod.deleting
        stops = pod is not None and is_stopping(pod, datetime.now(UTC))
        brings_more, self.newest = newest > self.newest, newest
        self.looks = 0 if stops or (brings_more and not goes_on) else self.looks + 1
        if self.looks == LOOKS_FOR_THE_END and self.task.cancel():
            state = " goes on; its log" if goes_on else ": its log brings nothing and does not end; it"
            note(f"{self.name}{state} is not followed any more")


def _memory_of(line: Line) -> int:
    return sys.getsizeof(line) + sys.getsizeof(line.stamp) + sys.getsizeof(line.text)


async def _have_ended(streams: Iterable[_Stream]) -> bool:
    """Whether all have, by the next look.

    Raises:
        Exception: that of a stream.
    """
    tasks = [stream.task for stream in streams]
    if tasks:
        await asyncio.wait(tasks, timeout=SECONDS_BETWEEN_LOOKS)
    if not all(task.done() for task in tasks):
        return False
    for task in tasks:
        if not task.cancelled():
            task.result()
    return True


class _Absent(Exception):
    """The pod has no log yet, or none any more."""
