"""`ddpjob logs` of a job on a cluster: from its pods, or from its volume once these are gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, SUCCEEDED
from ddpjob_operator.cli.reader import while_read
from ddpjob_operator.cli.terminal import print_line, print_note
from ddpjob_operator.follow.job_lines import Volume, job_lines
from ddpjob_operator.follow.lines import Wanted
from ddpjob_operator.follow.read import read_job
from ddpjob_operator.follow.table import visible
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_status

Read = Callable[[], Awaitable[Json]]
"""Of the job that was asked for."""


def show_logs(cluster: Cluster, name: str, wanted: Wanted, follow: bool, volume: Volume) -> int:
    """Print what the ranks have printed or, with `follow`, print it until the job or the attempt has ended."""

    async def ask(client: Client, namespace: str) -> int:
        is_shown = False
        uid = await _uid(client, namespace, name) if follow and volume.claim is None else None
        read = partial(read_job, client, namespace, name, uid)
        lines = job_lines(client, namespace, name, wanted, follow=follow, volume=volume, note=print_note, uid=uid)
        try:
            async with aclosing(lines):
                async for line in lines:
                    is_shown = True
                    print_line(line)
        except ApiError:
            if not is_shown and volume.claim is None:
                await _print_tail(read)
            raise
        return await _code(read, wanted) if follow and volume.claim is None else SUCCEEDED

    return asked(cluster, while_read(ask))


async def _uid(client: Client, namespace: str, name: str) -> str | None:
    """That of the job which has the name now; None if it is gone, and maybe its volume is not."""
    try:
        uid: str = (await read_job(client, namespace, name))["metadata"]["uid"]
    except ApiError as error:
        if not error.not_found:
            raise
        return None
    return uid


async def _print_tail(read: Read) -> None:
    """What the status has of a failed pod's log, where the logs cannot be read."""
    with suppress(ApiError):
        failure = parse_status((await read()).get("status") or {}).last_failure
        if failure is not None and failure.log_tail:
            print("\n".join(map(visible, failure.log_tail.splitlines())))


async def _code(read: Read, wanted: Wanted) -> int:
    """That of a job that was followed to its end, or to that of an attempt after which it goes on. How one ended that
    is gone is not known.
    """
    try:
        status = parse_status((await read()).get("status") or {})
    except ApiError as error:
        if not error.not_found:
            raise
        return SUCCEEDED
    if not status.is_final and wanted.is_before(status.attempt):
        return SUCCEEDED
    return SUCCEEDED if status.phase is Phase.SUCCEEDED else FAILED
