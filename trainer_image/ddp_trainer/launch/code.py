"""The submitted code (`spec.code`): from the archives in the pod to the working directory of the ranks.

    archives, mounted  →  code/<sha256>/ on the volume, read-only files  →  links in work/<job>/

Each pod does it once, before its first attempt, and several pods do it at the same time: the first that renames its
copy has made it, and the others verify that one. A copy that is there already is read and compared too: jobs of other
people may write to the volume.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path
from typing import IO, Final

from ddp_trainer.contract.environment import PodEnvironment, SubmittedCode
from ddp_trainer.contract.json_files import FULL
from ddp_trainer.launch.code_archive import Listing, read_archives
from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.leftovers import beside, put_in_place, remove, remove_leftovers
from ddp_trainer.launch.unused import mark_used, remove_unused_aside
from ddp_trainer.launch.work_links import link_code

_CHUNK_BYTES: Final = 1 << 20


def put_code(pod: PodEnvironment) -> None:
    """Have the code that `pod` names on the volume, and links to it in the working directory of the ranks.

    Raises UserError for code that cannot be used, OSError where the volume cannot be written to.
    """
    if pod.code is not None:
        listing = unpack(pod.code, pod.shared / "code")
        link_code(listing, pod.code.sha256, pod.shared, pod.job)


def volume_failure(what: str, error: OSError) -> tuple[str, str]:
    """The reason of docs/contracts.md section 5, and the message."""
    return "DiskFull" if error.errno in FULL else "WorkerException", f"{what}: {error}"


def unpack(code: SubmittedCode, folder: Path) -> Listing:
    """Have the code at `folder/<sha256>`, whole, and return its files. Raises as `put_code`."""
    tree, began = folder / code.sha256, time.monotonic()
    mark_used(tree)
    if tree.exists():
        listing = read_archives(code, lambda path, mode, content: _hash(content))
        damage = difference(tree, listing)
        if damage is None:
            log(f"code {code.sha256[:12]}: {_files(listing)}, on the volume already")
            return listing
        log(f"code {code.sha256[:12]}: its copy on the volume was changed ({damage}) and is replaced")
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder, time.time())
    part = beside(tree)
    part.mkdir()
    try:
        listing = read_archives(code, lambda path, mode, content: _write(content, part / path, mode))
        put_in_place(part, tree, lambda: difference(tree, listing) is None)
    finally:
        remove(part)
    remove_unused_aside(folder.parent)
    log(f"code {code.sha256[:12]}: unpacked {_files(listing)} in {time.monotonic() - began:.1f} s")
    return listing


def difference(tree: Path, listing: Listing) -> str | None:
    """What is not as listed in the folder `tree`, in words; None if it is the same.

    Modes are not compared, since some volumes have none; nor is bytecode, which Python writes there for a script that
    imports by its resolved path.
    """
    for path, entry in listing.items():
        try:
            if not stat.S_ISREG((tree / path).lstat().st_mode):
                return f"{path} is no file any more"
            with (tree / path).open("rb") as file:
                if _hash(file) != entry.sha256:
                    return f"{path} is different"
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
    for parent, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (str(Path(parent, name).relative_to(tree)) for name in [*names, *links]):
            if path not in listing:
                return f"{path} was added"
    return None


def _write(content: IO[bytes], path: Path, mode: int) -> str:
    """Write a read-only file; the SHA-256 of its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        sha256 = _hash(content, into=file)
    # Python takes bytecode for current if the time and the size of its source are the same. Times of unpacking or of
    # commits can be equal for two versions of a file; one that follows from the content is not.
    changed = 10**9 + int(sha256[:7], 16)
    os.utime(path, (changed, changed))
    path.chmod(mode & 0o555)
    return sha256


def _hash(content: IO[bytes], into: IO[bytes] | None = None) -> str:
    sha256 = hashlib.sha256()
    while chunk := content.read(_CHUNK_BYTES):
        sha256.update(chunk)
        if into is not None:
            into.write(chunk)
    return sha256.hexdigest()


def _files(listing: Listing) -> str:
    return "1 file" if len(listing) == 1 else f"{len(listing)} files"
