"""`ddpjob snapshots`: the trainer's own command, run where the snapshots are: here, or in a pod with the volume."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import REFUSED, SUCCEEDED, Output
from ddpjob_operator.cli.terminal import print_note
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.follow.read import read_job
from ddpjob_operator.follow.snapshots import on_record
from ddpjob_operator.follow.volume_export import export
from ddpjob_operator.follow.volume_snapshots import (
    CHANGES,
    Snapshot,
    has_no_directory,
    list_on_volume,
    parse_snapshots,
    run_on_volume,
    snapshots_on_volume,
)
from ddpjob_operator.home import expanded
from ddpjob_operator.local.volume import VolumeError, lock_job, newest_snapshot
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.submit.pack import size_in_words
from ddpjob_operator.wire.jobs import parse_status

SECONDS_BETWEEN_NOTES = 5.0


def run_here(shared: Path, name: str, command: str, options: Sequence[str] = ()) -> int:
    """Run the trainer's command on a folder of this machine; its exit code."""
    checkpoints = expanded(shared).absolute() / "checkpoints"
    directory = checkpoints / name
    is_name = re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) is not None
    if is_name and command == "ls" and not directory.is_dir() and (checkpoints.parent / "logs" / name).is_dir():
        print(f"no snapshot in {directory}")
        return SUCCEEDED
    if not is_name or not directory.is_dir():
        jobs = sorted(path.name for path in checkpoints.glob("*"))
        found = [job for job in jobs if newest_snapshot(checkpoints.parent, job) is not None]
        there = f"it has those of {', '.join(found[:10])}" if found else "name the folder of the run with --shared"
        return _refuse(f"{shared} has no snapshots of {name}; {there}")
    if importlib.util.find_spec("ddp_trainer") is None:
        hint = "install ddpjob[cli,trainer], as `pip install '.[cli,trainer]'` in a checkout does"
        return _refuse(f"ddp_trainer: not installed for {sys.executable}; {hint}")
    try:
        with lock_job(checkpoints.parent, name) if command in CHANGES else nullcontext() as lock:
            inherited = () if lock is None else (lock,)
            return _run([sys.executable, "-m", "ddp_trainer.snapshots", command, str(directory), *options], inherited)
    except VolumeError as error:
        return _refuse(str(error))


def show_here(shared: Path, name: str, output: Output) -> int:
    """Print the snapshots in a folder of this machine."""
    if output is Output.TEXT:
        return run_here(shared, name, "ls")
    said = io.StringIO()
    with redirect_stdout(said):
        code = run_here(shared, name, "ls", ("--json",))
    if code == SUCCEEDED:
        _print([as_json(found) for found in parse_snapshots(said.getvalue().splitlines())], output)
    return code


def show_record(cluster: Cluster, name: str, output: Output = Output.TEXT) -> int:
    """Print the snapshots that the status of a job on a cluster has on record."""

    async def ask(client: Client, namespace: str) -> int:
        status = parse_status((await read_job(client, namespace, name)).get("status") or {})
        if output is Output.TEXT:
            lines = on_record(status, datetime.now(UTC))
            print("\n".join(lines) if lines else f"no snapshot of {name} is on record")
        else:
            newest = () if status.snapshot is None else (status.snapshot,)
            _print([found.model_dump(mode="json", by_alias=True) for found in newest], output)
        print(f"ddpjob snapshots ls {name} --on-volume lists all that the volume has", file=sys.stderr)
        return SUCCEEDED

    return asked(cluster, ask)


def show_on_volume(cluster: Cluster, name: str, image: str | None, output: Output) -> int:
    """Print the snapshots that the volume of a job on a cluster has."""

    async def ask(client: Client, namespace: str) -> int:
        if output is Output.TEXT:
            return await _list_on_volume(client, namespace, name, image)
        found = await snapshots_on_volume(client, namespace, name, image, print_note)
        _print([as_json(snapshot) for snapshot in found], output)
        return SUCCEEDED

    return asked(cluster, ask)


async def _list_on_volume(client: Client, namespace: str, name: str, image: str | None) -> int:
    """Print what the trainer's command lists; its exit code, or 0 where the job has not saved anything yet."""
    code, lines = await list_on_volume(client, namespace, name, (), image=image, note=print_note)
    if code != SUCCEEDED and has_no_directory(lines):
        print(f"no snapshot of {name} is on its volume")
        return SUCCEEDED
    for line in lines:
        print(line)
    return code


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """With names as in the status of a DDPJob; what is not known is left out."""
    time = None if snapshot.time is None else f"{snapshot.time:%Y-%m-%dT%H:%M:%SZ}"
    found = {
        "series": snapshot.series,
        "step": snapshot.step,
        "time": time,
        "kind": snapshot.kind,
        "bytes": snapshot.bytes,
        "lossIsFinite": snapshot.loss_is_finite,
        "problem": snapshot.problem,
        "setAside": snapshot.set_aside,
    }
    return {field: value for field, value in found.items() if value is not None}


def _print(snapshots: list[dict[str, Any]], output: Output) -> None:
    answer = {"snapshots": snapshots}
    if output is Output.JSON:
        print(json.dumps(answer, indent=2))
    else:
        print(yaml.safe_dump(answer, sort_keys=False, allow_unicode=True), end="")


def run_in_pod(cluster: Cluster, name: str, command: str, options: Sequence[str], image: str | None) -> int:
    """Run the trainer's command in a pod that has the volume of a job on a cluster; its exit code."""

    async def ask(client: Client, namespace: str) -> int:
        say = partial(print, flush=True)
        code, job = await run_on_volume(
            client, namespace, name, command, options, image=image, say=say, note=print_note
        )
        if command == "restore" and code == SUCCEEDED:
            print_note(what_begins_it(job))
        return code

    return asked(cluster, ask)


def export_from_cluster(cluster: Cluster, name: str, to: Path, state: str, step: int | None, image: str | None) -> int:
    """Bring a state of a job on a cluster into a folder of this machine; the exit code."""

    async def ask(client: Client, namespace: str) -> int:
        found = await export(
            client,
            namespace,
            name,
            to,
            state=state,
            step=step,
            image=image,
            say=partial(print, file=sys.stderr, flush=True),
            note=print_note,
            moved=noted_at_times(print_note, time.monotonic),
        )
        if found.code == SUCCEEDED:
            print(f"step {found.step}: wrote {' and '.join(map(str, found.files))}")
        return found.code

    return asked(cluster, ask)


def noted_at_times(note: Callable[[str], None], clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    """Note how far a file is, when it is begun and every 5 s."""
    last: tuple[str, float] = "", 0.0

    def moved(name: str, here: int, size: int) -> None:
        nonlocal last
        now = clock()
        if name != last[0] or now - last[1] >= SECONDS_BETWEEN_NOTES:
            last = name, now
            note(
                f"{name}: {size_in_words(here)} of {size_in_words(size)}" if here else f"{name}: {size_in_words(size)}"
            )

    return moved


def what_begins_it(job: Job) -> str:
    """The command that begins the attempt from a restored snapshot: a job that has succeeded would begin anew."""
    if job.status.is_final:
        return "ddpjob submit --resume, with the script and options of before, begins it"
    return f"ddpjob unsuspend {job.name} begins it"


def _run(command: Sequence[str], inherited: Sequence[int]) -> int:
    """What it prints goes through our own output, which a reader that goes away does not stop; Ctrl-C ends it. What
    ends this process alone, as SIGTERM does, leaves it with the `inherited` file descriptors.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        errors="surrogateescape",  # it prints the bytes of a path, which the locale may not decode
        start_new_session=True,
        pass_fds=inherited,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            return 130


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return REFUSED
