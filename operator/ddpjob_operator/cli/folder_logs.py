"""`ddpjob logs --shared`: what the ranks of a job in a folder have printed, also after its pods are gone."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.on_cluster import FAILED, REFUSED, SUCCEEDED, print_line, print_note
from ddpjob_operator.cli.why import job_in
from ddpjob_operator.follow.logs import Wanted
from ddpjob_operator.page.folder import FolderLogs, NoTimes
from ddpjob_operator.page.records import record_of


def show_folder_logs(folder: Path, name: str, wanted: Wanted, *, follow: bool) -> int:
    """Print the wanted lines, node after node, or with `follow` until the job has ended."""
    shared = job_in(folder, name)
    if shared is None:
        return REFUSED
    since = "" if wanted.since_seconds is None else _ago(wanted.since_seconds)
    logs = FolderLogs(shared, name, wanted, since=since)
    try:
        if not follow:
            return _now(logs)
        asyncio.run(_follow(logs))
    except NoTimes as error:
        print(
            f"error: --since: the lines of {error} have no times, as ddpjob run wrote it; give --tail", file=sys.stderr
        )
        return REFUSED
    except KeyboardInterrupt:
        return 130
    return SUCCEEDED if record_of(shared, name).phase == Phase.SUCCEEDED else FAILED


def _ago(seconds: int) -> str:
    """That time, as lines begin with it."""
    try:
        return f"{datetime.now(UTC) - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}"
    except OverflowError:
        return "0"


def _now(logs: FolderLogs) -> int:
    shown = False
    for line in logs.now():
        print_line(line)
        shown = True
    if not shown:
        print_note(f"{logs.shared.logs(logs.name) / 'pods'} has no line that matches")
    return SUCCEEDED


async def _follow(logs: FolderLogs) -> None:
    async for line in logs.follow():
        print_line(line)
