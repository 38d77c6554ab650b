"""One writer at a time: the newest attempt of a job owns its directory on the volume.

After a node is lost its pod may still run beside the attempt that replaced it. Kubernetes cannot stop it; the volume
can. Each attempt creates a fencing token, a file of its own below `attempts/`, with O_CREAT|O_EXCL, which NFS (version
3 and later) carries out atomically on the server; no lock is needed that could outlive its holder. Tokens sort by
creation of the job, then attempt, so the greatest owns the directory. The files stay: they are the job's history of
failures.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.contract.json_files import FULL
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.names import ATTEMPTS

_NAME = re.compile(r"([0-9]{12})-([0-9]{6})-([A-Za-z0-9][A-Za-z0-9.-]{0,127})")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of the job on this volume. `created` is the job's creation time and `time` the token's, both in
    seconds.
    """

    created: int
    attempt: int
    uid: str
    time: float | None = None
    host: str | None = None

    @property
    def name(self) -> str:
        """The fencing token: a file name; the greatest owns."""
        return f"{self.created:012d}-{self.attempt:06d}-{self.uid}"


@dataclass(frozen=True, slots=True)
class Fence:
    """The right to write to `directory`, to be checked again before anything is renamed or removed."""

    directory: Path
    own: Attempt
    check_view: Callable[[], None] | None = None
    """Of ranks that recover live, which change places within an attempt: raises SnapshotError where another rank
    writes now, OSError where that cannot be known.
    """

    @classmethod
    def acquire(
        cls,
        job_dir: Path,
        *,
        created: int,
        attempt: int,
        uid: str,
        world_size: int = 1,
        nodes: int = 1,
        check_view: Callable[[], None] | None = None,
        disk: Disk | None = None,
    ) -> Fence:
        """Create the fencing token of this attempt. The same numbers and uid again are the same attempt, restarted.

        Raises FencedError if there is a token of a newer attempt, UserError for a uid or number that cannot be a file
        name, OSError if the volume cannot be written.
        """
        own = Attempt(created, attempt, uid, time.time(), socket.gethostname())
        if not _NAME.fullmatch(own.name):
            raise UserError(
                f"created={created}, attempt={attempt}, uid={uid!r} cannot name an attempt: "
                "check DDPJOB_CREATED, DDPJOB_ATTEMPT and DDPJOB_UID"
            )
        disk = disk or Disk()
        tokens = job_dir / ATTEMPTS
        if tokens.is_symlink():
            raise UserError(f"{tokens} is a symbolic link: remove it, fencing tokens belong in the job's own directory")
        with contextlib.suppress(FileExistsError):
            disk.make_directory(tokens)
        fence = cls(job_dir, own, check_view)
        fence.check()
        details = {"time": own.time, "host": own.host, "worldSize": world_size, "nodes": nodes}
        try:
            disk.create(tokens / own.name, [json.dumps(details).encode()])
        except FileExistsError:
            pass
        except OSError as error:
            # The name is the token; what is in it tells people more. On a full volume it is this attempt that makes
            # room: it removes what unfinished saves have left, and old snapshots before it saves its own.
            if error.errno not in FULL or not os.path.lexists(tokens / own.name):
                raise
        disk.fsync(tokens)
        # Two attempts may have come at once; both see both tokens now, and the older one stops here.
        fence.check()
        return fence

    def check(self) -> None:
        """Raise FencedError if there is a token of a newer attempt by now, and what `check_view` raises."""
        tokens = self.directory / ATTEMPTS
        # An NFS client may answer a listing from its cache. Setting the directory's time goes to the server, whose
        # reply shows that the directory has changed and so drops the cached listing.
        with contextlib.suppress(PermissionError):
            os.utime(tokens)
        newest = max((entry.name for entry in os.scandir(tokens) if _NAME.fullmatch(entry.name)), default="")
        if newest > self.own.name:
            newer = _parse(newest)
            raise FencedError(
                f"attempt {self.own.attempt} (uid {self.own.uid}) is fenced: attempt {newer.attempt} "
                f"(uid {newer.uid}) owns {self.directory}. This attempt is older: "
                f"it stops here and leaves every file to the newer one{_of_clocks(self.own, newer)}"
            )
        if self.check_view is not None:
            self.check_view()


def history(job_dir: Path) -> list[Attempt]:
    """All attempts that have a token in `job_dir`, oldest first. One whose content is unreadable counts by its name
    alone.
    """
    try:
        tokens = sorted(path for path in (job_dir / ATTEMPTS).iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []
    return [_parse(path.name, _details(path)) for path in tokens]


def _of_clocks(own: Attempt, newer: Attempt) -> str:
    """What else may be the cause: all attempts of one job have one creation time, except without an operator, where it
    is when each began.
    """
    if own.uid != newer.uid or own.created == newer.created:
        return ""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newer.created))
    return f". Without an operator a run is older by the clock: if it was set back, start the run again after {when}"


def _parse(name: str, details: dict[str, object] | None = None) -> Attempt:
    created, attempt, uid = name.split("-", 2)
    details = details or {}
    when, host = details.get("time"), details.get("host")
    return Attempt(
        int(created),
        int(attempt),
        uid,
        float(when) if isinstance(when, int | float) else None,
        host if isinstance(host, str) else None,
    )


def _details(path: Path) -> dict[str, object] | None:
    # Empty after a crash between creating and writing, or on a full volume; the name alone is the token.
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
