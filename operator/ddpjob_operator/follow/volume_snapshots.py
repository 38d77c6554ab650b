"""The snapshots on the volume of a job: the trainer's own command, in a short-lived pod that has the volume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpjob_operator.core.manifests.volume_pod import VolumeCommand, build_volume_pod
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.follow.read import read_job, read_pods
from ddpjob_operator.follow.reader import claim_of, image_of, image_with, read_claim, refuse_beyond_bounds
from ddpjob_operator.follow.snapshots import why_not_now
from ddpjob_operator.follow.volume_pod import Note, run_pod
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import InvalidJob, parse_job
from ddpjob_operator.wire.pods import parse_pod

CHANGES = {"restore": "restored", "rm": "removed"}
"""The commands that change the directory, which they do not while the job runs."""
ROLE = "snapshots"
"""Of the pod, and the name of its container."""
MOST_LISTED = 8 << 20
"""Characters of a list of snapshots: the image of a job may print without end."""
_CHECKPOINTS = "/mnt/shared/checkpoints"
_NO_DIRECTORY = "is not a directory"
_OLDER_IMAGE = "unrecognized arguments: --json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot on a volume, or a checkpoint of the program's own. None is unknown, as of one that is damaged."""

    step: int
    series: str = "step"
    """`checkpoint` for one of the program's own."""
    time: datetime | None = None
    """When it was complete on the volume."""
    kind: str | None = None
    """`periodic`, `final`, `preempted` or `emergency`."""
    bytes: int | None = None
    loss_is_finite: bool = True
    problem: str | None = None
    """What is wrong with it; no attempt resumes from it then."""
    set_aside: bool = False
    """By a restore from an older one."""


async def run_on_volume(
    client: Client,
    namespace: str,
    name: str,
    command: str,
    options: Sequence[str],
    *,
    image: str | None,
    say: Note,
    note: Note,
) -> tuple[int, Job]:
    """Say each line that a command of `python -m ddp_trainer.snapshots` prints; its exit code, and the job.

    Raises:
        ApiError: there is no such job, it runs and the command changes snapshots, or the pod could not be made or did
            not start.
    """
    manifest, job = await pod_on_volume(client, namespace, name, command, options, image)
    return await run_pod(client, namespace, manifest, say, note), job


async def pod_on_volume(
    client: Client, namespace: str, name: str, command: str, options: Sequence[str], image: str | None
) -> tuple[Json, Job]:
    """A pod for a command of `python -m ddp_trainer.snapshots`, not made yet, and the job.

    Raises:
        ApiError: there is no such job, it was refused, or it runs and the command changes snapshots.
    """
    found = await read_job(client, namespace, name)
    pods = await read_pods(client, namespace, found)
    try:
        job = parse_job(found)
    except InvalidJob as error:
        raise ApiError(422, "Invalid", f"{name}: {'; '.join(error.problems)}") from error
    refuse_beyond_bounds(job)
    if command in CHANGES:
        why_not = why_not_now(name, job.status, map(parse_pod, pods), CHANGES[command])
        if why_not:
            raise ApiError(409, "Conflict", why_not)
    used = image or job.spec.image or image_of(pods)
    if used is None:
        claim = await read_claim(client, namespace, claim_of(job))
        used = image_with(claim, name)
    what = VolumeCommand(
        ROLE,
        "ddp_trainer.snapshots",
        (command, f"{_CHECKPOINTS}/{name}", *options),
        writes=command in CHANGES,
        loads=command == "export",
    )
    return build_volume_pod(job, used, what), job


async def list_on_volume(
    client: Client, namespace: str, name: str, options: Sequence[str], *, image: str | None, note: Note
) -> tuple[int, list[str]]:
    """The exit code of the trainer's `ls`, and the lines that it prints.

    Raises:
        ApiError: as `run_on_volume`, or it prints more than any list has.
    """
    lines: list[str] = []
    left = MOST_LISTED

    def keep(line: str) -> None:
        nonlocal left
        left -= len(line) + 1
        if left < 0:
            what = f"the pod that lists the snapshots of {name} printed more than {MOST_LISTED} characters"
            raise ApiError(0, "TooLarge", f"{what}; name a trainer image with --image, in Python image=")
        lines.append(line)

    code, _ = await run_on_volume(client, namespace, name, "ls", options, image=image, say=keep, note=note)
    return code, lines


async def snapshots_on_volume(
    client: Client, namespace: str, name: str, image: str | None = None, note: Note = lambda _: None
) -> tuple[Snapshot, ...]:
    """All that the volume of a job has, the newest first; then checkpoints of the program's own, then what a restore
    has set aside.

    Raises:
        ApiError: as `list_on_volume`, or its image has no such command.
    """
    code, lines = await list_on_volume(client, namespace, name, ("--json",), image=image, note=note)
    if code:
        raise_unless_empty(lines, f"the pod that reads the volume ended with exit code {code}")
        return ()
    return parse_snapshots(lines)


def has_no_directory(lines: Sequence[str]) -> bool:
    """Whether a command failed, by its lines, because the job has not saved anything yet."""
    return bool(lines) and _NO_DIRECTORY in lines[-1]


def raise_unless_empty(lines: Sequence[str], what: str) -> None:
    """Of the lines of a command that failed: nothing is wrong where the job has not saved anything yet.

    Raises:
        ApiError: with its last line.
    """
    if has_no_directory(lines):
        return
    said = lines[-1] if lines else what
    if _OLDER_IMAGE in said:
        said = "the trainer image is older than this, and lists snapshots as text only; name a newer one with --image"
        said += ", in Python image="
    raise ApiError(0, "NoSnapshots", said)


def parse_snapshots(lines: Iterable[str]) -> tuple[Snapshot, ...]:
    """Those that `python -m ddp_trainer.snapshots ls --json` prints. Other lines, such as warnings, are left out."""
    found = (_parse(line) for line in lines if line.startswith("{"))
    return tuple(snapshot for snapshot in found if snapshot is not None)


def _parse(line: str) -> Snapshot | None:
    """None for a line of something else that writes JSON, as loggers of libraries do."""
    try:
        found = json.loads(line)
        return _snapshot(found) if type(found["step"]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _snapshot(found: dict[str, Any]) -> Snapshot:
    time = found.get("time")
    return Snapshot(
        step=found["step"],
        series=found.get("series", "step"),
        time=None if time is None else datetime.fromisoformat(time),
        kind=found.get("kind"),
        bytes=found.get("bytes"),
        loss_is_finite=found.get("lossIsFinite", True),
        problem=found.get("problem"),
        set_aside=found.get("setAside", False),
    )
