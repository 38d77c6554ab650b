"""A job on a cluster, for asyncio: what became of it, its output, and what can be done with it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from ddpjob.notebook import display_here
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.cluster import paths
from ddpjob_operator.follow.job_lines import Volume, job_lines
from ddpjob_operator.follow.lines import Line, Wanted
from ddpjob_operator.follow.logs import JobLogs
from ddpjob_operator.follow.outage import Patient
from ddpjob_operator.follow.read import read_job, see
from ddpjob_operator.follow.volume_snapshots import Snapshot, snapshots_on_volume
from ddpjob_operator.follow.watch import watch
from ddpjob_operator.follow.why import Answer, why
from ddpjob_operator.local.display import Display
from ddpjob_operator.runtime.client import Client, Json, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import CLI
from ddpjob_operator.wire.jobs import parse_status, ranks_per_node

_RESOURCE = "ddpjobs"
_SECONDS_BETWEEN_LOOKS = 1.0


class JobFailed(Exception):
    """The job has failed. The message says why; `status` is what it ended with."""

    def __init__(self, status: DDPJobStatus, answer: Answer) -> None:
        super().__init__(answer.text())
        self.status = status
        self.answer = answer


class AsyncJob:
    """One job. Close it at the end, or use it as a context manager; the job itself goes on. With `uid` it is never
    another job that has got its name since.
    """

    def __init__(self, client: Client, namespace: str, name: str, uid: str | None = None) -> None:
        self._client = client
        self.namespace = namespace
        self.name = name
        self._uid = uid

    @classmethod
    async def get(cls, name: str, *, namespace: str | None = None, context: str | None = None) -> AsyncJob:
        """A job that is there.

        Raises:
            ApiError: there is none, or the cluster refused.
        """
        client = await connect(context=context, agent=CLI)
        try:
            job = cls(client, namespace or client.namespace, name)
            job._uid = (await job.read())["metadata"]["uid"]
        except BaseException:
            await client.close()
            raise
        return job

    async def read(self) -> Json:
        """The DDPJob as JSON."""
        return await read_job(self._client, self.namespace, self.name, self._uid)

    async def status(self) -> DDPJobStatus:
        return parse_status((await self.read()).get("status") or {})

    async def snapshots(self, *, image: str | None = None) -> tuple[Snapshot, ...]:
        """All that its volume has, which a short-lived pod reads: the newest first, then checkpoints of the program's
        own, then what a restore has set aside. `image` is that of the pod, by default that of the job.

        `status().snapshot` is the newest one on record, without a pod.

        Raises:
            ApiError: there is no such job, the pod may not be made or did not start within three minutes, or its image
                is older than this.
        """
        await self.read()  # raises where another job has its name now
        return await snapshots_on_volume(self._client, self.namespace, self.name, image)

    async def why(self) -> Answer:
        """Why it is where it is; `headline` says it in one line, `text()` with the evidence."""
        return why(await see(self._client, self.namespace, self.name, self._uid))

    async def wait(self, seconds: float | None = None) -> DDPJobStatus:
        """Wait until it has succeeded.

        Raises:
            JobFailed: it has failed.
            TimeoutError: it has not ended within these seconds.
            ApiError: it was deleted, the cluster refused, or gave no answer for five minutes.
        """
        patient = Patient()
        async with asyncio.timeout(seconds):
            while True:
                status = await patient.read(self.status)
                if status.is_final:
                    break
                await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        if status.phase is not Phase.SUCCEEDED:
            raise JobFailed(status, await self.why())
        return status

    async def watch(self, display: Display | None = None) -> DDPJobStatus:
        """Show it until it has ended: in a notebook as an output that is replaced, on a terminal as a live view. The
        status that it ended with, also of a failure.

        Raises:
            ApiError: it was deleted, the cluster refused, or gave no answer for five minutes.
        """
        with display or display_here() as shown:
            return await watch(self._client, self.namespace, self.name, shown, uid=self._uid)

    async def logs(
        self,
        *,
        follow: bool = True,
        rank: int | None = None,
        node: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        since: timedelta | None = None,
        grep: str | None = None,
        claim: str | None = None,
        image: str | None = None,
    ) -> AsyncGenerator[Line, None]:
        """What the ranks print: with `follow` as it comes, over all attempts until the job has ended.

        `rank` or `node`, a node rank, chooses whose lines; `attempt` is the newest by default, and one that is named is
        followed to its own end. Of the lines of each pod that match `grep`, `tail` leaves the last so many, and `since`
        those of so long ago and newer.

        Once the pods are gone, and once the DDPJob is, a short-lived pod reads the newest attempt from the volume, and
        is deleted when the generator ends or is closed; its lines have no time stamp. `claim` names the claim of a job
        that is gone, by default the operator's, and `image` the image of that pod, by default that of the job.

        Raises:
            ApiError: there is no such job, its volume is gone or has no such log, the pod that reads it did not start
                within three minutes, or the cluster refused.
            ValueError: `rank` and `node` are both given, or a number is less than 0.
        """
        wanted = _wanted(rank, node, attempt, tail, since, grep)
        volume = Volume(claim=claim, image=image)
        lines = job_lines(self._client, self.namespace, self.name, wanted, follow=follow, volume=volume, uid=self._uid)
        async with contextlib.aclosing(lines):
            async for line in lines:
                yield line

    async def all_logs(self, wanted: Wanted) -> JobLogs:
        """The logs with every way to choose lines."""
        job = await self.read()
        uid = job["metadata"]["uid"]
        return JobLogs(self._client, self.namespace, self.name, ranks_per_node(job), wanted, uid=uid)

    async def suspend(self) -> None:
        """Its pods save a snapshot and end; `unsuspend` resumes from it."""
        await self.change({"suspend": True})

    async def unsuspend(self) -> None:
        await self.change({"suspend": False})

    async def scale(self, nodes: int) -> None:
        """Give an elastic job another number of nodes."""
        await self.change({"nodes": nodes})

    async def change(self, spec: Mapping[str, Any]) -> None:
        """Change fields of the spec that may be changed.

        Raises:
            ApiError: it has ended, or the field cannot be changed.
        """
        job = await self.read()
        status = parse_status(job.get("status") or {})
        if status.is_final:
            ended = f"{self.name} has {str(status.phase).lower()}: it cannot be changed any more"
            raise ApiError(409, "Conflict", ended)
        if "nodes" in spec and not (job.get("spec") or {}).get("elastic"):
            fixed = f"{self.name} is not elastic, so its nodes cannot change; delete it and apply it with spec.elastic"
            raise ApiError(422, "Invalid", fixed)
        body = {"metadata": {"uid": job["metadata"]["uid"]}, "spec": dict(spec)}
        await self._client.merge_patch(self._path, _RESOURCE, body)

    async def cancel(self, uid: str | None = None) -> None:
        """Delete it: its pods save a snapshot and end, each with its whole grace period. Its volume is kept, unless
        shared.retain is false. `uid`: only if it is still this one.
        """
        uid = uid or (await self.read())["metadata"]["uid"]
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        await self._client.delete(self._path, _RESOURCE, options)

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> AsyncJob:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _path(self) -> str:
        return f"{paths.jobs(self.namespace)}/{self.name}"


def _wanted(
    rank: int | None,
    node: int | None,
    attempt: int | None,
    tail: int | None,
    since: timedelta | None,
    grep: str | None,
) -> Wanted:
    if rank is not None and node is not None:
        raise ValueError("rank, node: a rank is on one node; give one of them")
    seconds = None if since is None else math.ceil(since.total_seconds())  # a kubelet takes whole ones, and at least 1
    numbers = {"rank": rank, "node": node, "attempt": attempt, "tail": tail, "since": seconds}
    for name, value in numbers.items():
        least = 1 if name == "since" else 0
        if value is not None and value < least:
            unit = " s" if name == "since" else ""
            raise ValueError(f"{name}: {value}{unit} is too small; give {least}{unit} or more")
    pattern = None if grep is None else re.compile(grep)
    return Wanted(node=node, rank=rank, attempt=attempt, pattern=pattern, tail=tail, since_seconds=seconds)
