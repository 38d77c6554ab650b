"""`ddpjob snapshots`: the trainer's own command, run where the snapshots are: here, or in a pod with the volume."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ddpjob_operator.cli.on_cluster import REFUSED, SUCCEEDED, Cluster, asked, print_note
from ddpjob_operator.core.manifests.volume_pod import VolumeCommand, build_volume_pod
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.follow.read import read_job, read_pods
from ddpjob_operator.follow.reader import claim_of, image_of, image_with, read_claim
from ddpjob_operator.follow.snapshots import on_record, why_not_now
from ddpjob_operator.follow.volume_pod import run_pod
from ddpjob_operator.local.volume import VolumeError, lock_job
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import InvalidJob, parse_job, parse_status
from ddpjob_operator.wire.pods import parse_pod

_CHECKPOINTS = "/mnt/shared/checkpoints"
_CHANGES = {"restore": "restored", "rm": "removed"}
"""The commands that change the directory, which they do not while the job runs."""


def run_here(shared: Path, name: str, command: str, options: Sequence[str] = ()) -> int:
    """Run the trainer's command on a folder of this machine; its exit code."""
    checkpoints = shared.expanduser().absolute() / "checkpoints"
    directory = checkpoints / name
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) or not directory.is_dir():
        found = sorted(path.name for path in checkpoints.glob("*") if path.is_dir())
        there = f"it has those of {', '.join(found[:10])}" if found else "name the folder of the run with --shared"
        return _refuse(f"{shared} has no snapshots of {name}; {there}")
    if importlib.util.find_spec("ddp_trainer") is None:
        return _refuse(f"ddp_trainer: not installed for {sys.executable}; pip install 'ddpjob[cli,trainer]'")
    try:
        with lock_job(checkpoints.parent, name) if command in _CHANGES else nullcontext():
            return _run([sys.executable, "-m", "ddp_trainer.snapshots", command, str(directory), *options])
    except VolumeError as error:
        return _refuse(str(error))


def show_record(cluster: Cluster, name: str) -> int:
    """Print the snapshots that the status of a job on a cluster has on record."""

    async def ask(client: Client, namespace: str) -> int:
        job = await read_job(client, namespace, name)
        lines = on_record(parse_status(job.get("status") or {}), datetime.now(UTC))
        print("\n".join(lines) if lines else f"no snapshot of {name} is on record")
        print(f"ddpjob snapshots ls {name} --on-volume lists all that the volume has", file=sys.stderr)
        return SUCCEEDED

    return asked(cluster, ask)


def run_on_volume(cluster: Cluster, name: str, command: str, options: Sequence[str], image: str | None) -> int:
    """Run the trainer's command in a pod that has the volume of a job on a cluster; its exit code."""

    async def ask(client: Client, namespace: str) -> int:
        found = await read_job(client, namespace, name)
        pods = await read_pods(client, namespace, found)
        try:
            job = parse_job(found)
        except InvalidJob as error:
            raise ApiError(422, "Invalid", f"{name}: {'; '.join(error.problems)}") from error
        if command in _CHANGES:
            why_not = why_not_now(name, job.status, map(parse_pod, pods), _CHANGES[command])
            if why_not:
                raise ApiError(409, "Conflict", why_not)
        used = image or job.spec.image or image_of(pods)
        if used is None:
            claim = await read_claim(client, namespace, claim_of(job))
            used = image_with(claim, name)
        arguments = (command, f"{_CHECKPOINTS}/{name}", *options)
        what = VolumeCommand("snapshots", "ddp_trainer.snapshots", arguments, writes=command in _CHANGES)
        manifest = build_volume_pod(job, used, what)
        code = await run_pod(client, namespace, manifest, partial(print, flush=True), print_note)
        if command == "restore" and code == SUCCEEDED:
            print_note(what_begins_it(job))
        return code

    return asked(cluster, ask)


def what_begins_it(job: Job) -> str:
    """The command that begins the attempt from a restored snapshot: a job that has succeeded would begin anew."""
    if job.status.is_final:
        return "ddpjob submit --resume, with the script and options of before, begins it"
    return f"ddpjob unsuspend {job.name} begins it"


def _run(command: Sequence[str]) -> int:
    """What it prints goes through our own output, which a reader that goes away does not stop; Ctrl-C ends it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
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
