"""`ddpjob logs --shared`: what the ranks of a job in a folder have printed, also after its pods are gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.on_cluster import FAILED, REFUSED, SUCCEEDED, print_line, print_note
from ddpjob_operator.cli.why import job_in
from ddpjob_operator.follow.logs import Line, Wanted, is_wanted, last_of
from ddpjob_operator.page.files import Shared
from ddpjob_operator.page.folder import NAMESPACE, FolderSource, log_of, record_of
from ddpjob_operator.page.values import LogQuery

_WHOLE_BYTES = 1 << 30
"""Of the log of a pod; what is before the last so many is left out."""
_ALL_LINES = 1 << 40


def show_folder_logs(folder: Path, name: str, wanted: Wanted, *, follow: bool) -> int:
    """Print the wanted lines, node after node, or with `follow` until the job has ended."""
    shared = job_in(folder, name)
    if shared is None:
        return REFUSED
    if not follow:
        return _now(shared, name, wanted)
    try:
        asyncio.run(_follow(shared, name, wanted))
    except KeyboardInterrupt:
        return 130
    return SUCCEEDED if record_of(shared, name).phase == Phase.SUCCEEDED else FAILED


def _now(shared: Shared, name: str, wanted: Wanted) -> int:
    by_node: dict[int, list[Line]] = {}
    for line in log_of(shared, name, LogQuery(None, wanted.attempt, _ALL_LINES), _WHOLE_BYTES):
        by_node.setdefault(line.node, []).append(line)
    shown = 0
    for node, lines in by_node.items():
        if wanted.node in (None, node):
            for line in last_of([line for line in lines if is_wanted(line, wanted)], wanted):
                print_line(line)
                shown += 1
    if not shown:
        print_note(f"{shared.logs(name) / 'pods'} has no line that matches")
    return SUCCEEDED


async def _follow(shared: Shared, name: str, wanted: Wanted) -> None:
    tail = _ALL_LINES if wanted.tail is None else wanted.tail
    async for line in FolderSource(shared).follow(NAMESPACE, name, LogQuery(wanted.rank, wanted.attempt, tail)):
        if wanted.node in (None, line.node) and is_wanted(line, wanted):
            print_line(line)
