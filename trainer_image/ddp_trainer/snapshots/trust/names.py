"""Names on the volume (docs/contracts.md section 6), and keeping them inside the job's own directory."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from ddp_trainer.contract.exit_codes import UserError

MANIFEST = "manifest.json"
ATTEMPTS = "attempts"
TEMPORARY = ".tmp-"
CORRUPT = ".corrupt"

_STEP = re.compile(r"step-([0-9]{12})")
_CORRUPT = re.compile(r"step-([0-9]{12})\.corrupt")
# What Kubernetes allows as an object's name (RFC 1123 subdomain): no separator, no "..", no leading dot.
_JOB = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def step_directory(step: int) -> str:
    """`step-000000000100` for 100: names sort as their numbers do."""
    return f"step-{step:012d}"


def parse_step(name: str) -> int | None:
    """The step of a snapshot's directory name, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def parse_corrupt(name: str) -> int | None:
    """The step of the directory name of a snapshot that was set aside, or None for any other name."""
    match = _CORRUPT.fullmatch(name)
    return int(match[1]) if match else None


def is_plain_file_name(name: str) -> bool:
    """Whether a manifest's file name stays below the snapshot: relative, no `..`, no empty part, no NUL."""
    parts = name.split("/")
    return "\0" not in name and not PurePosixPath(name).is_absolute() and not {"", ".", ".."} & set(parts)


def job_directory(shared: Path, job: str) -> Path:
    """Where the job's snapshots live: `<shared>/checkpoints/<job>`, created if need be.

    Raises UserError if the job's name is not one that Kubernetes allows, or if the place is a symbolic link to
    elsewhere: on a shared volume another user may have put it there.
    """
    if len(job) > 253 or not _JOB.fullmatch(job):
        raise UserError(
            f"job name {job!r} cannot be a directory below {shared}/checkpoints: "
            "use lower-case letters, digits, '-' and '.', as Kubernetes does"
        )
    directory = shared / "checkpoints" / job
    directory.mkdir(parents=True, exist_ok=True)
    if directory.resolve() != shared.resolve() / "checkpoints" / job:
        raise UserError(
            f"{directory} leads to {directory.resolve()}, outside the job's own place on the volume: "
            "remove the symbolic link"
        )
    return directory
