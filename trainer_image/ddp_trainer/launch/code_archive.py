"""The archives of the submitted code: their files, one by one, and the digest of them.

The author of a job writes the archives, so nothing in them is trusted: a path that leaves the folder, a link, a
size that would fill the volume, is one UserError, before anything is written.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final, NamedTuple

from ddp_trainer.contract.environment import SubmittedCode
from ddp_trainer.contract.exit_codes import UserError

MOST_PARTS: Final = 8
MOST_BYTES: Final = 256 << 20
MOST_FILES: Final = 20_000

_MODES: Final = (0o644, 0o755)
_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 1024
_HEADER_BYTES: Final = 4096
"""Of a tar archive, for each file: its header, one more for a long name, and padding."""

_CHUNK_BYTES: Final = 1 << 20

_DAMAGED: Final = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    ValueError,
    OverflowError,
    RecursionError,  # tarfile reads a header that describes the next one by a call within the call
)
SUBMIT_AGAIN: Final = "submit the code again"


class Entry(NamedTuple):
    """One file as the digest counts it: `mode` is 0o644 or 0o755, `sha256` of its content."""

    mode: int
    sha256: str


Listing = Mapping[str, Entry]
"""The files of a folder by their paths in it."""


Consume = Callable[[str, int, IO[bytes]], str]
"""Takes the path, mode and content of one file, and returns the SHA-256 of the content."""


def digest(listing: Listing) -> str:
    """SHA-256 of the listing (docs/contracts.md section 2): one tree has one digest, however it was packed."""
    files = sorted(listing.items(), key=lambda item: item[0].encode())
    return hashlib.sha256(
        b"".join(f"{mode:o} {sha256} {path}\n".encode() for path, (mode, sha256) in files)
    ).hexdigest()


def read_hashed(content: IO[bytes], into: IO[bytes] | None = None) -> str:
    """The SHA-256 of what can be read there, which is written to `into`."""
    sha256 = hashlib.sha256()
    while chunk := content.read(_CHUNK_BYTES):
        sha256.update(chunk)
        if into is not None:
            into.write(chunk)
    return sha256.hexdigest()


def read_archives(code: SubmittedCode, consume: Consume) -> Listing:
    """Pass each file to `consume`, and return all of them.

    Raises UserError for what is damaged, too large, not allowed, or not what was submitted, and what `consume` raises.
    """
    archives = sorted(code.archives.glob("*.tar.gz"))
    if not 1 <= len(archives) <= MOST_PARTS:
        raise UserError(
            f"{code.archives} has {len(archives)} archives of code instead of 1 to {MOST_PARTS}: {SUBMIT_AGAIN}"
        )
    rules, listing = _Rules(), dict[str, Entry]()
    for archive in archives:
        try:
            with _Bounded(archive, rules) as stream, tarfile.open(fileobj=stream, mode="r|") as members:
                for member in members:
                    path = rules.path_of(member)
                    if path is not None:
                        content = members.extractfile(member)
                        assert content is not None  # of a regular file
                        listing[path] = Entry(member.mode, consume(path, member.mode, content))
        except _DAMAGED as error:
            raise UserError(f"the code archive {archive.name} is damaged ({error}): {SUBMIT_AGAIN}") from error
    found = digest(listing)
    if found != code.sha256:
        raise UserError(
            f"the submitted code has the digest {found}, and {code.sha256} was expected: {SUBMIT_AGAIN}, and do not "
            "edit the objects that hold it"
        )
    return listing


class _Rules:
    """What the archives may hold, all together."""

    def __init__(self) -> None:
        self.unpacked = 0
        """Bytes, with the headers of the archives."""
        self._bytes = 0
        self._members = 0
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def path_of(self, member: tarfile.TarInfo) -> str | None:
        """The path of this file; None for a directory, which is made for its files. Raises UserError."""
        path = member.name
        self._members += 1
        self._bytes += member.size
        if self._members > MOST_FILES:
            raise UserError(f"the submitted code has more than {MOST_FILES:,} files and folders; {_LEAVE_OUT}")
        if self._bytes > MOST_BYTES:
            raise too_large()
        problem = _path_problem(path)
        if problem is None and member.isdir():
            return None
        if problem is None and (member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse()):
            problem = "is no regular file (links and devices are not taken)"
        if problem is None and member.size < 0:
            problem = f"has the size {member.size}"
        if problem is None and member.mode not in _MODES:
            problem = f"has the mode {member.mode:o} and not 644 or 755"
        if problem is None and path in self._files:
            problem = "is there twice"
        parents = {path[: slash.start()] for slash in re.finditer("/", path)}
        if problem is None and (path in self._folders or parents & self._files):
            problem = "is a file and a folder"
        if problem is not None:
            raise UserError(f"the submitted code cannot be used: {path!r} {problem}; {SUBMIT_AGAIN}")
        self._files.add(path)
        self._folders |= parents
        return path


_LEAVE_OUT: Final = "list in .ddpjobignore what training does not need, and put data on the volume"


def too_large() -> UserError:
    return UserError(f"the submitted code has more than {MOST_BYTES >> 20} MiB unpacked; {_LEAVE_OUT}")


def _path_problem(path: str) -> str | None:
    parts = path.split("/")
    if path.startswith("/"):
        return "is an absolute path"
    if ".." in parts:
        return "leads out of the folder"
    if "" in parts or "." in parts:
        return "is no plain path"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if re.search(r"[\0-\x1f\x7f]", path):  # a line break would make two lines of the listing
        return "has a control character"
    if len(encoded) > _LONGEST_PATH or max(len(part.encode()) for part in parts) > _LONGEST_NAME:
        return "is too long"
    return None


class _Bounded(gzip.GzipFile):
    """An archive of which no more is read than the rules allow: a few bytes of gzip may be terabytes."""

    def __init__(self, archive: Path, rules: _Rules) -> None:
        super().__init__(archive, "rb")
        self._rules = rules

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._rules.unpacked += len(data)
        if self._rules.unpacked > MOST_BYTES + MOST_FILES * _HEADER_BYTES:
            raise too_large()
        return data
