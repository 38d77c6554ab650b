"""A folder in which jobs write what they like, opened so that nothing outside it is read.

A job may put a link, a pipe or a million files into its place, and may replace a folder by a link while it is looked
at. So a path is opened folder by folder from the root, none of which may be a link, and what is read is what was
opened.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

_JSON_BYTES = 1 << 20
_MOST_ENTRIES = 20_000
"""Of a folder."""
_MOST_DIGITS = 18
_NAME = re.compile(r"[^/\0]{1,253}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared folder."""

    root: Path
    within: Path | None = None
    """The folder above it from which on no link is followed; itself, if None."""

    def job_names(self) -> list[str]:
        """Every job that has left logs or snapshots."""
        found = {name for folder in ("logs", "checkpoints") for name in self.folders(self.root / folder)}
        return sorted(name for name in found if not name.startswith("."))

    def has(self, job: str) -> bool:
        """Whether there is such a job; a name that leads elsewhere is none."""
        if job in (".", "..") or _NAME.fullmatch(job) is None:
            return False
        return any(self.is_folder(folder) for folder in (self.logs(job), self.checkpoints(job)))

    def logs(self, job: str) -> Path:
        return self.root / "logs" / job

    def checkpoints(self, job: str) -> Path:
        return self.root / "checkpoints" / job

    def is_folder(self, path: Path) -> bool:
        """Whether there is such a folder, below this one or itself."""
        with suppress(OSError, ValueError), self._folder(path):
            return True
        return False

    def names(self, path: Path) -> list[str]:
        """What is in a folder, sorted, and at most some; none if it is none."""
        with suppress(OSError, ValueError), self._folder(path) as folder, os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
        return []

    def folders(self, path: Path) -> list[str]:
        """Those of them that are folders."""
        with suppress(OSError, ValueError), self._folder(path) as folder, os.scandir(folder) as entries:
            return sorted(e.name for e in islice(entries, _MOST_ENTRIES) if e.is_dir(follow_symlinks=False))
        return []

    def status(self, path: Path) -> os.stat_result | None:
        """Size and times of a file, a folder, or a link itself; None if there is none."""
        with suppress(OSError, ValueError), self._folder(path.parent) as folder:
            return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        return None

    def open(self, path: Path) -> BinaryIO:
        """A regular file below the folder.

        Raises:
            OSError: it is none, or a link is on the way.
            ValueError: the path is none, or not below the folder.
        """
        with self._folder(path.parent) as folder:
            # a pipe is opened, too, without waiting for one who writes
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        file = os.fdopen(descriptor, "rb")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file

    def read(self, path: Path, most: int, *, from_end: bool = False) -> bytes:
        """At most that many bytes of a regular file below the folder; empty if it is none."""
        with suppress(OSError, ValueError), self.open(path) as file:
            if from_end:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
        return b""

    def objects(self, path: Path, most: int) -> list[dict[str, Any]]:
        """The JSON objects in the last so many bytes, one a line."""
        lines = self.read(path, most, from_end=True).splitlines()
        return [found for line in lines if (found := json_object(line)) is not None]

    def json(self, path: Path) -> dict[str, Any]:
        """The JSON object that a file is; empty if it is none."""
        return json_object(self.read(path, _JSON_BYTES)) or {}

    @contextmanager
    def _folder(self, path: Path) -> Iterator[int]:
        """A descriptor of a folder."""
        start = self.within or self.root
        # by parts: a long list of jobs comes here often, and `relative_to` takes longer than opening a folder
        below_root = path.parts[: len(self.root.parts)] == self.root.parts
        parts = path.parts[len(start.parts) :]
        if ".." in parts or not below_root:
            raise ValueError(f"{path} leads out of {self.root}")
        descriptor = os.open(start, _FOLDER)
        try:
            for part in parts:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


def json_object(line: bytes) -> dict[str, Any] | None:
    """A JSON object; None if it is none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line, parse_int=_integer)
        return found if isinstance(found, dict) else None
    return None


def _integer(text: str) -> int | float:
    """A number without a fraction. One of more than 18 digits counts no steps: nor is it one, for all that reads it. An
    integer without a bound would stop the first page that makes a float or a C integer of it.
    """
    return int(text) if len(text) <= _MOST_DIGITS else float(text)
