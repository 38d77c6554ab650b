"""The files of the submitted code in `work/<job>`, the working directory of all ranks.

They are copies, and the job's own. A script that looks for its folder by `Path(__file__).resolve()` finds the working
directory, and what it writes there is kept as what it writes by relative paths is. A link would lead it to
`code/<digest>`, which all jobs with this code have in common. They may be written to: `shutil.copy` and `cp` give a
copy the mode of the file, and a script that keeps its source beside its logs copies it over the last one in each
attempt.

A record beside the working directory, `work/.<job>/code.json`, has the digests of what was put there: a file with one
of them is the code's, and makes way for other code. Any other is the job's and stays, with one exception: where
something that runs, such as a module, is not what was submitted, it is set aside under another name, and so is a link
or a file in the place of a folder of modules.

Several pods put the same files there at the same time, each of them at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

from ddp_trainer.contract.durable import make_durable
from ddp_trainer.contract.environment import SubmittedCode
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.launch.code_archive import MOST_BYTES, Entry, Listing, read_archives, read_hashed
from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.leftovers import beside, remove, remove_leftovers
from ddp_trainer.launch.unused import CODE, mark_used

SHOWN: Final = 3
_RUNS: Final = re.compile(
    r"(.*/)?([^/]+\.(py|pyc|pyz|so|so\.[^/]+|sh|whl|zip|tar\.gz)|pyproject\.toml|setup\.cfg|(requirements|constraints)[^/]*\.(txt|in))"
)
"""What runs, or is installed for all jobs with the same requirements. The rest is data, which a script may write to."""
_TREE: Final = re.compile(r".*/code/[0-9a-f]{64}")
_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EXDEV, errno.EMLINK)

Whose = Literal["code", "earlier", "changed", "job"]
"""Of what is in the place of a file: the code's, as submitted; put there for earlier code, or damaged; the code's, runs
and was changed; the job's own."""


class FilePlan(NamedTuple):
    """By path: files to write, what to set aside first in their places or in those of their folders, files to remove,
    and what the job has in the place of a file or folder of the code.
    """

    make: tuple[str, ...]
    set_aside: tuple[str, ...]
    remove: tuple[str, ...]
    taken: tuple[str, ...]


def plan_files(paths: Collection[str], found: Mapping[str, Whose]) -> FilePlan:
    """What to do to have these files. `found` has what is in their places, and in those of their folders."""
    taken = {path for path, whose in found.items() if whose == "job"}
    wanted = set(paths)
    make = sorted(
        path for path in wanted if found.get(path) in (None, "earlier", "changed") and taken.isdisjoint(_parents(path))
    )
    return FilePlan(
        tuple(make),
        tuple(sorted(path for path, whose in found.items() if whose == "changed")),
        tuple(sorted(path for path, whose in found.items() if whose == "earlier" and path not in wanted)),
        tuple(sorted(taken)),
    )


def whose_is(
    file: Path, path: str, entry: Entry | None, known: Collection[str], *, has_record: bool = True
) -> Whose | None:
    """None if nothing is there. `entry` is the file of the code at this path, if it has one; `known` are the digests of
    what was put there, all of them if this job `has_record` of that.
    """
    try:
        found = file.lstat()
        if stat.S_ISLNK(found.st_mode) and is_code_link(path, str(file.readlink())):
            return "earlier"
        may_be_changed = bool(known) and entry is not None and _runs(path, entry)
        if not stat.S_ISREG(found.st_mode):  # a link too: what it leads to would run
            return "changed" if may_be_changed else "job"
        sha256 = None
        with file.open("rb") as content:
            before = os.fstat(content.fileno())  # of `lstat`, NFS may remember an earlier one
            if before.st_size <= MOST_BYTES:
                sha256 = read_hashed(content)
            found = os.fstat(content.fileno())
        if (found.st_mtime_ns, found.st_size) != (before.st_mtime_ns, before.st_size):
            sha256 = None  # a script has written to it meanwhile
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:  # what was put there can be read
        return "job"
    if entry is not None and sha256 == entry.sha256:
        return "code"
    # A node that goes down may leave a file without its content; one that was written to later has another time.
    digests = {*known, *((entry.sha256,) if entry is not None else ())}
    if not has_record and sha256 is not None:
        # The time of what was put there still follows from what is in it. So does that of a copy which the job has made
        # of another file of its code with its time, as `shutil.copy2` does: with a record that is the job's.
        digests.add(sha256)
    if sha256 in known or found.st_mtime in map(time_of, digests):
        return "earlier"
    return "changed" if may_be_changed else "job"


def _runs(path: str, entry: Entry) -> bool:
    # on some file systems all files are executable, also data
    is_program = entry.mode & 0o111 != 0 and "." not in path.rpartition("/")[2]
    return is_program or _RUNS.fullmatch(path) is not None


def is_code_link(path: str, target: str) -> bool:
    """Whether a link at `path` leads to a file of code: launchers once made links to `code/<digest>` here."""
    tree = target.removesuffix(f"/{path}")
    return tree != target and _TREE.fullmatch(tree) is not None


def time_of(sha256: str) -> float:
    """The modification time of a file with this content. Python takes bytecode for current if the time and the size of
    its source are the same. Times of unpacking or of commits can be equal for two versions of a file; this one is not.
    """
    return float(10**9 + int(sha256[:7], 16))


def copy_code(listing: Listing, code: SubmittedCode, shared: Path, job: str) -> None:
    """Have the files of `listing`, which are those of `code`, in the working directory, and no others of earlier code.

    Raises UserError where the job has written something in the place of a file, OSError for the volume.
    """
    work, record = shared / "work" / job, shared / "work" / f".{job}" / CODE
    for folder in (work, record.parent):
        folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(record.parent, time.time())
    before = _read(record, listing)
    known, is_new = _files(before), before.get("sha256") != code.sha256
    has_record = "sha256" in before
    wanted = {path: {entry.sha256} for path, entry in listing.items()}
    is_recorded = not is_new and known == wanted
    if not is_new:
        known = {path: {*known.get(path, ()), *wanted.get(path, ())} for path in {*known, *wanted}}
    if is_new:
        if isinstance(before.get("sha256"), str):
            mark_used(shared / "code" / before["sha256"])
        _remove(work, {path: known[path] for path in known.keys() - listing.keys()})
    programs = {folder for path in known if path in listing and _runs(path, listing[path]) for folder in _parents(path)}

    def look(path: str) -> Whose | None:
        """What is in the place of this file or folder of the code; None for a folder too that is one."""
        if path not in listing and not (work / path).is_symlink() and (work / path).is_dir():
            return None
        whose = whose_is(work / path, path, listing.get(path), known.get(path, ()), has_record=has_record)
        return "changed" if whose == "job" and path in programs else whose

    found = _look(listing, look)
    plan = plan_files(listing, found)
    if is_new:
        # what the author has not changed since is as the job has left it
        refused = [
            path for path in plan.taken if path not in listing or listing[path].sha256 not in known.get(path, ())
        ]
        if refused:
            if _read(record, listing) != before:  # another pod was faster, and its script may have written since
                copy_code(listing, code, shared, job)
                return
            raise UserError(_refusal(work, refused))
        both = {path: {*known.get(path, ()), *_digests(listing, path)} for path in {*known, *listing}}
        _record(record, None, both)
    if plan.taken:
        log(f"kept what the job has written in the place of its code: {_listed(plan.taken)}")
    for path in plan.remove:
        if look(path) == "earlier":  # no other pod was faster
            (work / path).unlink(missing_ok=True)
    for path in plan.set_aside:
        if path not in listing and look(path) == "changed":
            _set_aside(work / path, moves=True)

    def may_replace(path: str) -> bool:
        """Another pod may have put it there since, and its script may have written to it."""
        whose = look(path)
        if whose == found[path] == "changed":
            _set_aside(work / path, moves=False)
        return whose is None or whose == found[path]

    _make(plan.make, found, may_replace, code, work, record)
    for path in (path for path, entry in listing.items() if entry.mode & 0o111 and found.get(path) == "code"):
        with contextlib.suppress(OSError):  # it belongs to somebody else
            if not (work / path).stat().st_mode & 0o100:
                (work / path).chmod(listing[path].mode)
    if not is_recorded:
        _record(record, code.sha256, wanted)


def _read(record: Path, listing: Listing) -> Mapping[str, Any]:
    """Without a record nothing was put there. Of one that has lost its content, the files of `listing` are the likely
    ones. Raises OSError where it cannot be read just now: without it, the files of the code would look like the job's.
    """
    try:
        value = json.loads(record.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"files": {path: [entry.sha256] for path, entry in listing.items()}}


def _files(record: Mapping[str, Any]) -> dict[str, set[str]]:
    """The digests of what was put there, by path; none of what launchers put there that made links."""
    files, links = record.get("files"), record.get("paths")
    found: dict[str, set[str]] = (
        {path: set() for path in links if isinstance(path, str)} if isinstance(links, list) else {}
    )
    for path, digests in files.items() if isinstance(files, dict) else ():
        if isinstance(digests, list):
            found[path] = {sha256 for sha256 in digests if isinstance(sha256, str)}
    return {path: digests for path, digests in found.items() if not {"..", "", "."} & set(path.split("/"))}


def _digests(listing: Listing, path: str) -> tuple[str, ...]:
    return (listing[path].sha256,) if path in listing else ()


def _look(listing: Listing, look: Callable[[str], Whose | None]) -> dict[str, Whose]:
    found: dict[str, Whose] = {}
    for folder in sorted({parent for path in listing for parent in _parents(path)}):
        if found.keys().isdisjoint(_parents(folder)) and (whose := look(folder)) is not None:
            found[folder] = whose
    for path in listing:
        if found.keys().isdisjoint(_parents(path)) and (whose := look(path)) is not None:
            found[path] = whose
    return found


def _remove(work: Path, known: Mapping[str, Collection[str]]) -> None:
    """Remove files of earlier code, and folders that are empty then but for bytecode."""

    def leads_out(path: str) -> bool:
        return any((work / folder).is_symlink() for folder in _parents(path))

    for path, digests in known.items():
        if not leads_out(path) and whose_is(work / path, path, None, digests) == "earlier":
            (work / path).unlink(missing_ok=True)
    for folder in sorted({parent for path in known for parent in _parents(path)}, reverse=True):
        if leads_out(folder) or (work / folder).is_symlink():
            continue
        with contextlib.suppress(OSError):  # it has files of the job, or is gone
            if [entry.name for entry in (work / folder).iterdir()] == ["__pycache__"]:
                shutil.rmtree(work / folder / "__pycache__")
            (work / folder).rmdir()


def _make(
    paths: Collection[str],
    found: Collection[str],
    may_replace: Callable[[str], bool],
    code: SubmittedCode,
    work: Path,
    record: Path,
) -> None:
    """Write these files, from the archives: a copy on the volume may be changed while it is read. Of those that were
    `found`, `may_replace` is asked last: unpacking takes a while.
    """
    if not paths:
        return
    wanted = frozenset(paths)
    # a folder: the time of a file in it is long ago, and another pod would take the file for a leftover
    part = beside(record)
    part.mkdir()

    def write(path: str, mode: int, content: IO[bytes]) -> str:
        if path not in wanted:
            return read_hashed(content)
        new = part / "file"
        sha256 = write_file(content, new, mode)
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        if path not in found:
            _put(new, work / path)
        elif may_replace(path):
            new.replace(work / path)
        new.unlink(missing_ok=True)
        return sha256

    try:
        read_archives(code, write)
    finally:
        remove(part)


def write_file(content: IO[bytes], path: Path, mode: int) -> str:
    """A new file with the time that follows from its content, and this mode, where the volume lets a process set them
    that its files do not belong to; the SHA-256 of the content.
    """
    with path.open("xb") as file:
        sha256 = read_hashed(content, into=file)
    # an SMB share and a mounted bucket may give all files to one user, and let nobody else (EPERM)
    with contextlib.suppress(PermissionError):
        os.utime(path, (time_of(sha256), time_of(sha256)))
    with contextlib.suppress(PermissionError):
        path.chmod(mode)
    return sha256


def _put(new: Path, path: Path) -> None:
    """Where nothing was: another pod may have put it there since, and its script may have written to it."""
    try:
        path.hardlink_to(new)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if not path.exists():
            new.replace(path)


def _set_aside(file: Path, *, moves: bool) -> None:
    """Keep what is there under another name: a file under its own as well, unless it `moves`, until the new one
    replaces it. A script that has it open writes into the other one from then on.
    """
    aside = file.with_name(f"{file.name[:200]}.changed-{os.urandom(4).hex()}")
    moves |= file.is_symlink() or not file.is_file()
    try:
        file.rename(aside) if moves else aside.hardlink_to(file)
    except FileNotFoundError:
        return
    except OSError as error:
        if moves or error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copyfile(file, aside)
    log(f"{file.name} is not what was submitted: it is replaced, and kept as {aside.name} in {file.parent}")


def _record(record: Path, sha256: str | None, files: Mapping[str, Collection[str]]) -> None:
    """`sha256` is None while not all files are there."""
    new = beside(record)
    new.write_text(json.dumps({"sha256": sha256, "files": {path: sorted(files[path]) for path in sorted(files)}}))
    make_durable(new)  # after a power cut it would have its name, and no content
    new.replace(record)


def _refusal(work: Path, taken: Collection[str]) -> str:
    return (
        f"the submitted code has files where the job has written its own in {work}: {_listed(taken)}; move or delete "
        "them there, or give the files of the code other names"
    )


def _listed(paths: Collection[str]) -> str:
    shown = sorted(paths)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


def _parents(path: str) -> list[str]:
    return [path[: slash.start()] for slash in re.finditer("/", path)]
