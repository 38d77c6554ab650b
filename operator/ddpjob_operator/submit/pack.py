"""A folder of code, packed for the ConfigMaps of a job (docs/contracts.md section 2).

Left out is what git would leave out (.gitignore and its other lists), what .ddpjobignore lists in the same form, and
what is no code of this folder: repositories, caches, virtual environments, private keys, folders that `ddpjob code`
wrote. The digest is of the files and not of the archives, so that it does not depend on a version of zlib, nor on what
is in which archive.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from ddpjob_operator.api.pod import MOST_CODE_PARTS
from ddpjob_operator.submit.git_excludes import lists_of_git
from ddpjob_operator.submit.repositories import (
    MOST_HEAD_BYTES,
    file_of_repository,
    is_head,
    is_named_head,
    is_repository,
)

MOST_PART_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB (ConfigMap validation of the API server), its keys included."""
MOST_BYTES = 64 << 20
MOST_FILES = 10_000
NOTHING: Mapping[str, bytes] = MappingProxyType({})
"""No further files."""
_HEADER_BYTES = 128
"""What a file takes in a compressed archive beside its content and its path."""
_TAR_HEADER_BYTES = 4096
"""What a file may take in an archive that is not compressed beside its content: headers, a long name, padding."""
_LONGEST_PATH = 1024
"""Of a file; pods refuse a longer one, too."""
FETCHED = ".ddpjob-code"
"""A file that `ddpjob code` leaves in its folder, which is the code of another job wherever it is part of a folder."""

_NO_CODE = GitIgnoreSpec.from_lines(
    [
        "__pycache__/",
        "*.py[co]",
        "*.egg-info/",
        ".*_cache/",
        ".ipynb_checkpoints/",
        ".DS_Store",
        FETCHED,
    ]
)
_SECRETS = GitIgnoreSpec.from_lines([
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519",
    "id_ed25519_sk", ".netrc", ".git-credentials", ".pypirc", ".npmrc", "kubeconfig",
])  # fmt: skip
_SECRET_FOLDERS = GitIgnoreSpec.from_lines([".ssh/", ".aws/", ".kube/", ".docker/", ".gnupg/"])
"""In a home directory, which may be the folder of a first try."""
_UNPRINTABLE = re.compile(r"[\0-\x1f\x7f-\x9f\ud800-\udfff]")
_OURS = ".ddpjobignore"
_IGNORE_FILES = (".gitignore", _OURS)


class BadCode(ValueError):
    """A folder that cannot be sent. The message says what it is about, why, and what to do."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of the code: `path` below the folder, with `/`; `mode` 0o644 or 0o755."""

    path: str
    mode: int
    content: bytes


@dataclass(frozen=True, slots=True)
class PackedCode:
    """A folder, packed."""

    folder: Path
    sha256: str
    parts: tuple[bytes, ...]
    """Each a gzip-compressed tar archive."""
    paths: frozenset[str]
    size: int
    """Bytes of all files."""
    left_out: tuple[str, ...]
    """What somebody may miss: one sentence each."""

    @property
    def in_words(self) -> str:
        """Such as `code 1f0c3a9b2d4e: 12 files, 48 kB`."""
        return f"code {self.sha256[:12]}: {files_in_words(len(self.paths))}, {size_in_words(self.size)}"


def pack(folder: Path, exclude: Iterable[Path] = (), added: Mapping[str, bytes] = NOTHING) -> PackedCode:
    """Pack the files of a folder, without those below `exclude`, and with others `added` by their paths in it.

    Raises:
        BadCode: there is no such folder, nothing in it, too much, or a file of a path that is added.
    """
    files, left_out = read_folder(folder, exclude)
    if taken := sorted(added.keys() & {file.path for file in files}):
        raise BadCode(f"{folder / taken[0]}: is the name of a file that is added; rename yours")
    files = sorted((*files, *(File(path, 0o644, content) for path, content in added.items())), key=_path)
    return PackedCode(
        folder=folder,
        sha256=digest(files),
        parts=tuple(_archive(group) for group in _grouped(folder, files)),
        paths=frozenset(file.path for file in files),
        size=sum(len(file.content) for file in files),
        left_out=tuple(left_out),
    )


def digest(files: Iterable[File]) -> str:
    """SHA-256 of the list of the files in the order of their paths, a line each: mode, SHA-256 of the content, path."""
    listing = hashlib.sha256()
    for file in sorted(files, key=_path):
        listing.update(f"{file.mode:o} {hashlib.sha256(file.content).hexdigest()} {file.path}\n".encode())
    return listing.hexdigest()


def _path(file: File) -> bytes:
    return file.path.encode()


def name_of(part: bytes) -> str:
    """Name of the ConfigMap that carries a part: equal parts have equal names."""
    return f"ddpjob-code-{hashlib.sha256(part).hexdigest()[:20]}"


def unpack(parts: Iterable[bytes]) -> list[File]:
    """The files of packed code, in the order of their paths.

    Raises:
        BadCode: it is damaged, or has something that `pack` does not write.
    """
    files: dict[str, File] = {}
    left = MOST_BYTES
    try:
        for part in parts:
            with tarfile.open(fileobj=io.BytesIO(_decompressed(part)), mode="r:") as archive:
                for member in archive:
                    left -= member.size
                    if not member.isreg() or not _is_plain(member.name) or member.name in files:
                        raise BadCode(f"the packed code has {member.name!r}, which is not a file of a folder")
                    if left < 0 or len(files) == MOST_FILES:
                        raise _too_large()
                    content = archive.extractfile(member)
                    assert content is not None
                    files[member.name] = File(member.name, 0o755 if member.mode & 0o100 else 0o644, content.read())
    except BadCode:
        raise
    except (tarfile.TarError, zlib.error, OSError, ValueError, OverflowError, RecursionError) as error:
        raise BadCode(f"the packed code cannot be read: {error}") from error
    if (found := file_of_repository({path: file.content for path, file in files.items()})) is not None:
        what = "is part of a repository, whose settings can run programs here"
        raise BadCode(
            f"the packed code has {found!r}, which {what}; no submit sends it: look at its ConfigMaps instead"
        )
    return [files[path] for path in sorted(files, key=str.encode)]


def _decompressed(part: bytes) -> bytes:
    """Of a tar archive. A megabyte of gzip may be a gigabyte, of which tarfile would read a header whole."""
    most = MOST_BYTES + MOST_FILES * _TAR_HEADER_BYTES
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    data = stream.decompress(part, most + 1)
    if len(data) > most:
        raise _too_large()
    if not stream.eof:
        raise BadCode("the packed code cannot be read: it is cut off")
    return data


def _is_plain(name: str) -> bool:
    """Whether `pack` could have written this name."""
    path = PurePosixPath(name)
    if len(name) > _LONGEST_PATH or FETCHED in path.parts:
        return False
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != name:
        return False
    return _is_printable(name)


def _too_large() -> BadCode:
    return BadCode(f"the packed code is larger than {MOST_BYTES >> 20} MiB or {MOST_FILES} files")


def read_folder(folder: Path, exclude: Iterable[Path] = ()) -> tuple[list[File], list[str]]:
    """The files that `pack` takes, in the order of their paths, and what it leaves out.

    Raises:
        BadCode: there is no such folder, nothing in it, or too much.
    """
    if not folder.is_dir():
        raise BadCode(f"{folder}: is not a folder; name the one that has the script")
    left_out: list[str] = []
    ignored: dict[str, int] = {}
    try:
        walk = _walk(folder, {Path(item).resolve() for item in exclude}, left_out, ignored)
        # not the whole disk, where somebody is in the wrong folder
        found = [(path, path.stat()) for path in islice(walk, MOST_FILES + 1)]
        sizes = {path.relative_to(folder).as_posix(): stat.st_size for path, stat in found}
        if not sizes:
            raise BadCode(f"{folder}: has no files to send; does git or .ddpjobignore ignore all of them?")
        if len(sizes) > MOST_FILES:
            more = f"has more than {MOST_FILES} files; change to the folder that has the code"
            raise BadCode(f"{folder.resolve()}: {more}, or list in .ddpjobignore what is none")
        if sum(sizes.values()) > MOST_BYTES:
            raise BadCode(_too_much(folder, sizes, f"{MOST_BYTES >> 20} MiB"))
        files = [
            File(name, 0o755 if stat.st_mode & 0o100 else 0o644, path.read_bytes())
            for name, (path, stat) in zip(sizes, found, strict=True)
        ]
        return sorted(files, key=_path), [*left_out, *_ignored_in_words(ignored)]
    except UnicodeEncodeError as error:
        raise BadCode(f"{error.object!r}: is not UTF-8; rename the file, or list it in .ddpjobignore") from None
    except OSError as error:
        raise BadCode(f"{error.filename}: {error.strerror}; make it readable, or list it in .ddpjobignore") from error


def _walk(folder: Path, exclude: set[Path], left_out: list[str], ignored: dict[str, int]) -> Iterator[Path]:
    """All files to send. What is not goes into `left_out` with the reason, or into `ignored`."""
    rules = {folder: [*_rules_above(folder), *_rules_of(folder)]}
    for place, folders, names in os.walk(folder, onerror=_refuse_closed):
        here = Path(place)
        inherited = rules.pop(here)
        for name in sorted(folders):
            inner = here / name
            if not _is_printable(name):
                left_out.append(_unprintable(inner, folder))
            elif inner.is_symlink():
                left_out.append(f"{inner.relative_to(folder)}: is a link to a folder; copy it, or read it elsewhere")
            elif not _is_left_out(inner, inherited, left_out, ignored, folder) and inner.resolve() not in exclude:
                rules[inner] = [*inherited, *_rules_of(inner)]
        folders[:] = [name for name in folders if here / name in rules]
        for name in sorted(names):
            path = here / name
            if not _is_printable(name):  # such as macOS' Icon\r; a line break would forge a line of the digest
                left_out.append(_unprintable(path, folder))
                continue
            # realpath takes a link to itself, too
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
                left_out.append(f"{path.relative_to(folder)}: is a link to {path.readlink()}, outside the folder")
            elif path.is_file() and not _is_left_out(path, inherited, left_out, ignored, folder):
                yield path


def _refuse_closed(error: OSError) -> None:
    """A folder that may not be read, such as that of a container that runs as root, may have code."""
    if isinstance(error, PermissionError):
        raise error


def _is_printable(name: str) -> bool:
    """Whether pods take it: no control character, and UTF-8. `str.isprintable` refuses blanks of other scripts too."""
    return _UNPRINTABLE.search(name) is None


def _unprintable(path: Path, folder: Path) -> str:
    return f"{str(path.relative_to(folder))!r}: has a name that cannot be printed"


class Rules(NamedTuple):
    """The patterns of a file, and the folder that they are relative to."""

    folder: Path
    spec: GitIgnoreSpec
    is_ours: bool
    """Of .ddpjobignore, which has the last word over git's files, also of folders further in."""


def _rules_of(folder: Path) -> Iterator[Rules]:
    for name in _IGNORE_FILES:
        yield from _rules_in(folder / name, folder)


def _rules_in(file: Path, folder: Path) -> Iterator[Rules]:
    try:
        text = file.read_text("utf-8-sig", errors="replace")
    except OSError:
        return
    spec = GitIgnoreSpec.from_lines(line for line in text.splitlines() if _is_pattern(line))
    yield Rules(folder, spec, file.name == _OURS)


def _is_pattern(line: str) -> bool:
    """git passes over a line that is none, such as `!` alone."""
    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def _rules_above(folder: Path) -> list[Rules]:
    """Those of the git repository that the folder is in, and of its user."""
    above: list[Rules] = []
    inner = folder.resolve()
    while inner.parent != inner and not (inner / ".git").exists():
        inner = inner.parent
        above = [*_rules_of(inner), *above]
    if not (inner / ".git").exists():
        return []
    top = folder if inner == folder.resolve() else inner
    return [*(rule for file in lists_of_git(inner) for rule in _rules_in(file, top)), *above]


def _is_left_out(path: Path, rules: list[Rules], left_out: list[str], ignored: dict[str, int], top: Path) -> bool:
    """As git decides: the last pattern that matches wins, and the innermost file of patterns comes last, ours after
    all of git's.
    """
    is_folder = path.is_dir()
    end = "/" if is_folder else ""
    if is_folder and _is_marked(path):
        return True
    if is_repository(path.name) or _matches(_NO_CODE, path.name, is_folder):
        return True
    if not is_folder and _is_head(path):
        left_out.append(f"{path.relative_to(top)}: is the HEAD of a git repository")
        return True
    is_secret = _matches(_SECRET_FOLDERS if is_folder else _SECRETS, path.name, is_folder) is True
    by_weight = sorted(rules, key=lambda rule: rule.is_ours)
    for folder, spec, _ in reversed(by_weight):
        base = path if path.is_relative_to(folder) else path.resolve()
        below = base.relative_to(folder).as_posix()
        found = _matches(spec, below, is_folder)
        if found is False and is_secret and _is_of_folder_around(spec, below, is_folder):
            break
        if found is not None:
            if found and is_folder and path.parent == top:
                left_out.append(f"{path.name}/: is ignored by git or .ddpjobignore")
            elif found and not is_secret and not _matches(spec, ".gitignore", False):  # it does not hide itself
                ignored[f"{path.relative_to(top).as_posix()}{end}"] = MOST_BYTES if is_folder else path.stat().st_size
            return found
    if is_secret:
        left_out.append(f"{path.relative_to(top)}{end}: may be a secret; `!{path.name}{end}` in .ddpjobignore sends it")
        return True
    return False


def _is_of_folder_around(spec: GitIgnoreSpec, path: str, is_folder: bool) -> bool:
    """Whether the pattern that decides is of a folder around the path, as `!data/` is: who writes that asks for data,
    and for no secret in there, unless the folder is one of secrets.
    """
    around = PurePosixPath(path).parents[:-1]
    index = spec.check_file(f"{path}/" if is_folder else path).index
    if index is None or any(_matches(_SECRET_FOLDERS, folder.name, True) for folder in around):
        return False
    pattern = list(spec.patterns)[index]
    return any(pattern.match_file(f"{folder}/") is not None for folder in around)


def pattern_that_sends(folder: Path, path: str) -> str:
    """The line of .ddpjobignore that sends a file which is left out. In a folder that is listed it is that of the
    folder, the outermost one: as in git, nothing in there is looked at.
    """
    rules = [*_rules_above(folder), *_rules_of(folder)]
    for around in reversed(PurePosixPath(path).parents[:-1]):
        if _is_left_out(folder / around, rules, [], {}, folder):
            return f"!{around}/"
        rules += _rules_of(folder / around)
    return f"!{path}"


def _is_marked(folder: Path) -> bool:
    """Whether it is a virtual environment, or from `ddpjob code`. One that may not be entered does not show it."""
    try:
        return any((folder / marker).exists() for marker in ("pyvenv.cfg", FETCHED))
    except PermissionError:
        return False


def _is_head(path: Path) -> bool:
    """Whether `unpack` refuses this file, with which git could take its folder for a repository."""
    if not is_named_head(path.name):
        return False
    with path.open("rb") as file:
        return is_head(file.read(MOST_HEAD_BYTES))


def _ignored_in_words(ignored: Mapping[str, int]) -> list[str]:
    """One line for all. The largest are named: data beside the code, which the script may miss."""
    if not ignored:
        return []
    named = sorted(ignored, key=lambda path: -ignored[path])[:3]
    more = f" and {len(ignored) - len(named)} more" if len(ignored) > len(named) else ""
    verb = "is" if len(ignored) == 1 else "are"
    sends = f"`!{named[0]}` in .ddpjobignore sends it" if len(ignored) == 1 else "`!NAME` in .ddpjobignore sends one"
    return [f"{', '.join(named)}{more}: {verb} ignored by git or .ddpjobignore; {sends}"]


def _matches(spec: GitIgnoreSpec, path: str, is_folder: bool) -> bool | None:
    return spec.check_file(f"{path}/" if is_folder else path).include


def _grouped(folder: Path, files: list[File]) -> list[list[File]]:
    """The files of each part."""
    sizes = {file.path: len(zlib.compress(file.content)) + len(file.path) + _HEADER_BYTES for file in files}
    path, largest = max(sizes.items(), key=lambda item: item[1])
    if largest > MOST_PART_BYTES:
        raise BadCode(_too_much(folder, {path: largest}, f"{size_in_words(MOST_PART_BYTES)} a file, compressed"))
    groups = _split(files, sizes)
    if len(groups) > MOST_CODE_PARTS:
        groups = _filled(files, sizes)
    if len(groups) > MOST_CODE_PARTS:
        allowed = f"{size_in_words(MOST_CODE_PARTS * MOST_PART_BYTES)}, compressed"
        raise BadCode(_too_much(folder, sizes, allowed))
    return groups


def _split(files: list[File], sizes: Mapping[str, int], bit: int = 0) -> list[list[File]]:
    """Halved by bits of the hashes of their paths until each part fits into a ConfigMap.

    So the part of a file depends on its path and on the size of what shares its bits. One that is edited, added or
    removed changes its own part alone, which it may split or join with its neighbour; the others are not sent again.
    """
    if sum(sizes[file.path] for file in files) <= MOST_PART_BYTES:
        return [files] if files else []
    halves: tuple[list[File], list[File]] = ([], [])
    for file in files:
        hashed = int.from_bytes(hashlib.sha256(file.path.encode()).digest())
        halves[hashed >> bit & 1].append(file)
    return [group for half in halves for group in _split(half, sizes, bit + 1)]


def _filled(files: Iterable[File], sizes: Mapping[str, int]) -> list[list[File]]:
    """In the order of their paths, as many in a part as a ConfigMap holds: a folder that is almost too large has no
    room for parts that are half empty.
    """
    groups: list[list[File]] = [[]]
    used = 0
    for file in files:
        if used + sizes[file.path] > MOST_PART_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(file)
        used += sizes[file.path]
    return groups


def _too_much(folder: Path, sizes: Mapping[str, int], allowed: str) -> str:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
    named = ", ".join(f"{path} ({size_in_words(sizes[path])})" for path in largest)
    total = f"{size_in_words(sum(sizes.values()))} in {files_in_words(len(sizes))}"
    return (
        f"{folder}: is too large to send: {total}, and {allowed} is allowed; the largest: {named}; put data and models "
        "on the shared volume, and list them in .ddpjobignore"
    )


def _archive(files: Iterable[File]) -> bytes:
    """The same bytes for the same files."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            member = tarfile.TarInfo(file.path)
            member.mode, member.size = file.mode, len(file.content)
            archive.addfile(member, io.BytesIO(file.content))
    return packed.getvalue()


def files_in_words(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def size_in_words(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{max(1, round(size / 1e3))} kB"
