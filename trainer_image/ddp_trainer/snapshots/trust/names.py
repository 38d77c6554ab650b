"""Names on the volume (docs/contracts.md section 6), and keeping them inside the job's own directory."""

from __future__ import annotations

import errno
import re
from pathlib import Path, PurePosixPath
from typing import Literal

from ddp_trainer.contract.exit_codes import UserError

MANIFEST = "manifest.json"
ATTEMPTS = "attempts"
TEMPORARY = ".tmp-"
CORRUPT = ".corrupt"

Series = Literal["step", "checkpoint"]
"""What a directory holds: our own snapshot of a step, or a checkpoint that the training program wrote."""

_DIGITS = r"([0-9]{12})"
LAST_STEP = 10**12 - 1
"""A directory of a later one has a name that is not looked for."""
# What Kubernetes allows as an object's name (RFC 1123 subdomain): no separator, no "..", no leading dot.
_JOB = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def step_directory(step: int, series: Series = "step") -> str:
    """`step-000000000100` for 100: names sort as their numbers do."""
    return f"{series}-{step:012d}"


def parse_step(name: str, series: Series = "step") -> int | None:
    """The step of a snapshot's directory name, or None for any other name."""
    match = re.fullmatch(f"{series}-{_DIGITS}", name)
    return int(match[1]) if match else None


def parse_corrupt(name: str, series: Series = "step") -> int | None:
    """The step of the directory name of a snapshot that was set aside, or None for any other name."""
    return parse_step(name.removesuffix(CORRUPT), series) if name.endswith(CORRUPT) else None


def is_plain_file_name(name: str) -> bool:
    """Whether a manifest's file name stays below the snapshot: relative, no `..`, no empty part, no NUL."""
    parts = name.split("/")
    return "\0" not in name and not PurePosixPath(name).is_absolute() and not {"", ".", ".."} & set(parts)


def job_directory(shared: Path, job: str) -> Path:
    """Where the job's snapshots live: `<shared>/checkpoints/<job>`, created if need be.

    Raises UserError if the job's name is not one that Kubernetes allows, if the volume is read-only, or if the place is
    a symbolic link to elsewhere: on a shared volume another user may have put it there. Raises OSError.
    """
    if len(job) > 253 or not _JOB.fullmatch(job):
        raise UserError(
            f"job name {job!r} cannot be a directory below {shared}/checkpoints: "
            "use lower-case letters, digits, '-' and '.', as Kubernetes does"
        )
    directory = shared / "checkpoints" / job
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if (refusal := not_writable(error, f"{directory} cannot be made: {error}")) is not None:
            raise refusal from error
        raise
    if directory.resolve() != shared.resolve() / "checkpoints" / job:
        raise UserError(
            f"{directory} leads to {directory.resolve()}, outside the job's own place on the volume: "
            "remove the symbolic link"
        )
    return directory


def not_writable(error: OSError, what: str) -> UserError | None:
    """`what` with the fix, if the volume refuses this user every time: no attempt would get further. None otherwise."""
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    return UserError(f"{what}. Mount the volume writable for this user")
