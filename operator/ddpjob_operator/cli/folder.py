"""The commands that ask the folder of `ddpjob run`, or a mounted volume: `why --shared` and `logs --shared`.

Nothing here imports what asks a cluster, which takes longer than the answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.parameters import FAILED, REFUSED, SUCCEEDED, Output
from ddpjob_operator.cli.reader import while_read
from ddpjob_operator.cli.terminal import print_line, print_note
from ddpjob_operator.follow.lines import Wanted
from ddpjob_operator.follow.why import Answer
from ddpjob_operator.home import expanded
from ddpjob_operator.page.folder import FolderLogs, NoTimes, answer_of, reports_of
from ddpjob_operator.page.records import record_of
from ddpjob_operator.page.shared import Shared


def explain_in_folder(folder: Path, name: str, output: Output = Output.TEXT) -> int:
    """Print why a job in the folder is where it is."""
    shared = job_in(folder, name)
    if shared is None:
        return REFUSED
    job = record_of(shared, name)
    print_answer(answer_of(job, datetime.now(UTC), reports_of(shared, job)), output)
    return SUCCEEDED


def show_folder_logs(folder: Path, name: str, wanted: Wanted, *, follow: bool) -> int:
    """Print the wanted lines, node after node, or with `follow` until the job has ended."""
    shared = job_in(folder, name)
    if shared is None:
        return REFUSED
    since = "" if wanted.since_seconds is None else _ago(wanted.since_seconds)
    logs = FolderLogs(shared, name, wanted, since=since)
    try:
        return asyncio.run(while_read(_follow)(logs)) if follow else _now(logs)
    except NoTimes as error:
        print(
            f"error: --since: the lines of {error} have no times, as ddpjob run wrote it; give --tail", file=sys.stderr
        )
        return REFUSED
    except KeyboardInterrupt:
        return 130


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


async def _follow(logs: FolderLogs) -> int:
    async for line in logs.follow():
        print_line(line)
    return SUCCEEDED if record_of(logs.shared, logs.name).phase == Phase.SUCCEEDED else FAILED


def job_in(folder: Path, name: str) -> Shared | None:
    """The folder, if it has such a job; else one line says which it has."""
    shared = Shared(expanded(folder).resolve())
    if shared.has(name):
        return shared
    known = ", ".join(shared.job_names()) or "none"
    print(f"error: --shared {folder}: no job {name} there; jobs: {known}", file=sys.stderr)
    return None


def print_answer(answer: Answer, output: Output) -> None:
    if output is Output.TEXT:
        print(answer.text())
    elif output is Output.JSON:
        print(json.dumps(asdict(answer), indent=2))
    else:
        print(yaml.safe_dump(json.loads(json.dumps(asdict(answer))), sort_keys=False, allow_unicode=True), end="")
