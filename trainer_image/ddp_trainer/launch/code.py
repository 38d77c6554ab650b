"""The submitted code (`spec.code`): from the archives in the pod to the working directory of the ranks.

    archives, mounted  →  code/<sha256>/ on the volume, read-only  →  copies in work/<job>/

Each pod does it once, before its first attempt, and several pods do it at the same time: the first that renames its
copy has made it, and the others verify that one. A copy that is there already is read and compared too: jobs of other
people may write to the volume.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from functools import partial
from pathlib import Path
from typing import IO

from ddp_trainer.contract.environment import PodEnvironment, SubmittedCode
from ddp_trainer.contract.json_files import FULL
from ddp_trainer.launch.code_archive import Listing, read_archives, read_hashed
from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.leftovers import beside, put_in_place, remove, remove_leftovers
from ddp_trainer.launch.unused import mark_used, remove_unused_aside
from ddp_trainer.launch.work_files import copy_code, write_file


def put_code(pod: PodEnvironment) -> None:
    """Have the code that `pod` names on the volume, and its files in the working directory of the ranks.

    Raises UserError for code that cannot be used, OSError where the volume cannot be written to.
    """
    if pod.code is not None:
        listing = unpack(pod.code, pod.shared / "code")
        copy_code(listing, pod.code, pod.shared, pod.job)


def volume_failure(what: str, error: OSError) -> tuple[str, str]:
    """The reason of docs/contracts.md section 5, and the message."""
    return "DiskFull" if error.errno in FULL else "WorkerException", f"{what}: {error}"


def unpack(code: SubmittedCode, folder: Path) -> Listing:
    """Have the code at `folder/<sha256>`, whole, and return its files. Raises as `put_code`."""
    tree, began = folder / code.sha256, time.monotonic()
    mark_used(tree)
    if tree.exists():
        listing = read_archives(code, lambda path, mode, content: read_hashed(content))
        damage = difference(tree, listing)
        if damage is None:
            log(f"code {code.sha256[:12]}: {_files(listing)}, on the volume already")
            return listing
        log(f"code {code.sha256[:12]}: its copy on the volume was changed ({damage}) and is mended")
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder, time.time())
    part = beside(tree)
    part.mkdir()
    try:
        listing = read_archives(code, partial(_write, part))
        put_in_place(part, tree, lambda: _is_mended(tree, part, listing))
    finally:
        remove(part)
    remove_unused_aside(folder.parent)
    log(f"code {code.sha256[:12]}: unpacked {_files(listing)} in {time.monotonic() - began:.1f} s")
    return listing


def difference(tree: Path, listing: Listing) -> str | None:
    """What is not as listed in the folder `tree`, in words; None if all of it is.

    Modes are not compared, since some volumes have none; nor is what else is there: scripts of earlier versions of the
    trainer have written into this folder, and nothing of it is imported or run.
    """
    for path in listing:
        problem = _problem(tree, path, listing)
        if problem is not None:
            return f"{path} {problem}"
    return None


def _problem(tree: Path, path: str, listing: Listing) -> str | None:
    try:
        if not stat.S_ISREG((tree / path).lstat().st_mode):
            return "is no file any more"
        with (tree / path).open("rb") as file:
            return None if read_hashed(file) == listing[path].sha256 else "is different"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"


def _is_mended(tree: Path, part: Path, listing: Listing) -> bool:
    """Whether `tree` has the files of `listing`, of which those that it lacks come from `part`. What is in the place of
    a folder, or a folder in that of a file, gets another name: only the files of the code are replaced.
    """
    if tree.is_symlink() or not tree.is_dir():
        return False
    for path in listing:
        if _problem(tree, path, listing) is not None:
            _make_way(tree, path)
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part / path, made := beside(tree / path))
            with contextlib.suppress(PermissionError):  # as in write_file
                shutil.copystat(part / path, made)
            made.replace(tree / path)
    return True


def _make_way(tree: Path, path: str) -> None:
    folders = [tree / folder for folder in reversed(Path(path).parents[:-1])]
    for place, is_in_the_way in (
        *((folder, folder.is_symlink() or (folder.exists() and not folder.is_dir())) for folder in folders),
        (tree / path, (tree / path).is_dir() and not (tree / path).is_symlink()),
    ):
        if is_in_the_way:
            with contextlib.suppress(FileNotFoundError):  # another pod was faster
                place.rename(place.with_name(f"{place.name[:200]}.changed-{os.urandom(4).hex()}"))


def _write(tree: Path, path: str, mode: int, content: IO[bytes]) -> str:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    return write_file(content, tree / path, mode & 0o555)


def _files(listing: Listing) -> str:
    return "1 file" if len(listing) == 1 else f"{len(listing)} files"
