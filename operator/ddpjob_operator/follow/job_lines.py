"""The lines that a job has printed, wherever they are: with its pods or, once these are gone, on its volume, also when
the DDPJob is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.follow.lines import Line, Wanted, pods_of
from ddpjob_operator.follow.logs import JobLogs
from ddpjob_operator.follow.read import REPLACED, read_job, read_pods
from ddpjob_operator.follow.volume_logs import VolumeLogs, may_be_on_volume_alone
from ddpjob_operator.follow.volume_pod import Note
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_status, ranks_per_node
from ddpjob_operator.wire.pods import parse_pod

Lines = AsyncGenerator[Line, None]


@dataclass(frozen=True, slots=True)
class Volume:
    """How the volume is read."""

    always: bool = False
    """Also where pods are left."""
    claim: str | None = None
    """The claim of a job that is gone."""
    image: str | None = None


async def job_lines(
    client: Client,
    namespace: str,
    name: str,
    wanted: Wanted,
    *,
    follow: bool,
    volume: Volume,
    note: Note = lambda _: None,
    uid: str | None = None,
) -> Lines:
    """Those of the pods as they are now or, with `follow`, as they come until the job has ended; of a job or an
    attempt whose pods are gone, those on its volume. Close it to stop early: that deletes the pod that reads the
    volume. `uid`: only of this job of the name.

    Raises:
        ApiError: there is no such job, its volume is gone or cannot be read, or the cluster refused.
    """
    async with aclosing(await _source(client, namespace, name, wanted, follow, volume, note, uid)) as lines:
        async for line in lines:
            yield line


async def _source(
    client: Client,
    namespace: str,
    name: str,
    wanted: Wanted,
    follow: bool,
    volume: Volume,
    note: Note,
    uid: str | None,
) -> Lines:
    on_volume = VolumeLogs(client, namespace, wanted, volume.image, note)
    if volume.claim is not None:
        return on_volume.of_claim(name, volume.claim)
    try:
        job = await read_job(client, namespace, name, uid)
    except ApiError as error:
        if not error.not_found or error.reason == REPLACED:
            raise
        return _of_a_job_that_is_gone(on_volume.of_claim(name, None), error)
    status, pods = parse_status(job.get("status") or {}), await read_pods(client, namespace, job)
    logs = JobLogs(client, namespace, name, ranks_per_node(job), wanted, uid=job["metadata"]["uid"])
    views = pods_of(map(parse_pod, pods), wanted, logs.ranks_per_node)
    goes_on = follow and not status.is_final and not wanted.is_before(status.attempt)
    if volume.always or (not views and may_be_on_volume_alone(status, wanted) and not goes_on):
        return on_volume.of_job(job, pods)
    return _followed(logs, note) if follow else _as_they_are(logs, views, note)


async def _of_a_job_that_is_gone(lines: Lines, gone: ApiError) -> Lines:
    """By the claim that the operator made for it, if there is one; else the job is unknown."""
    try:
        async with aclosing(lines):
            async for line in lines:
                yield line
    except ApiError as error:
        if not error.not_found and error.status != 403:  # who may not see claims has mistyped a name, most likely
            raise
        raise gone from None


async def _followed(logs: JobLogs, note: Note) -> Lines:
    """Lines, and notes between them, in the order in which they come."""
    said: asyncio.Queue[Line | str | None] = asyncio.Queue()
    following = asyncio.create_task(logs.follow(said.put_nowait, said.put_nowait), name=f"logs of {logs.name}")
    following.add_done_callback(lambda _: said.put_nowait(None))
    try:
        while (found := await said.get()) is not None:
            if isinstance(found, str):
                note(found)
            else:
                yield found
        await following
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await following


async def _as_they_are(logs: JobLogs, pods: Sequence[PodView], note: Note) -> Lines:
    """With a note of where to look if no line comes: the pods wait, or print nothing that is wanted."""
    is_shown = False
    async for line in logs.now(note):
        is_shown = True
        yield line
    if is_shown:
        return
    if any(pod.phase is not PodPhase.PENDING for pod in pods):
        note("no line of the job's pods matches")
    else:
        note(f"no pod of the job has started; ddpjob why {logs.name} says why")
