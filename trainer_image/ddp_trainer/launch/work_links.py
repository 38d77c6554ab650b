"""Links to the files of the submitted code in `work/<job>`, the working directory of all ranks.

Folders are folders and files are links, as with lndir: a script reads the files of its code by relative paths, writes
beside them onto the volume, and cannot change the code. What the job itself has written is never touched.

A record beside the working directory, `work/.<job>/code.json`, says where there may be links: looking for them in all
that a job has written could take minutes. Several pods make the same links at the same time, each of them at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.json_files import read_json
from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.leftovers import beside, remove_leftovers
from ddp_trainer.launch.unused import CODE, mark_used

SHOWN: Final = 3
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_TREE: Final = re.compile(r".*/code/[0-9a-f]{64}")

Found = Mapping[str, str | None]
"""What is in the working directory where the code has a file: by path, the target of a link, None for anything else.
Also what is in the place of a folder of the code."""


class LinkPlan(NamedTuple):
    """By path: links to make, links to remove, and what the job has in the place of a file or folder of the code."""

    make: tuple[str, ...]
    remove: tuple[str, ...]
    taken: tuple[str, ...]


def plan_links(targets: Mapping[str, str], found: Found) -> LinkPlan:
    """What to do to have the links `targets` (by path). Links of other code make way, everything else stays."""
    wrong = {path for path, target in found.items() if target is None or target != targets.get(path)}
    taken = {path for path in wrong if not is_code_link(path, found[path])}
    make = [
        path for path in targets if (path in wrong or path not in found) and taken.isdisjoint((path, *_parents(path)))
    ]
    return LinkPlan(tuple(make), tuple(sorted(wrong - taken - targets.keys())), tuple(sorted(taken)))


def is_code_link(path: str, target: str | None) -> bool:
    """Whether a link at `path` was made here, for any code; the volume may have been mounted elsewhere then."""
    tree = (target or "").removesuffix(f"/{path}")
    return tree != target and _TREE.fullmatch(tree) is not None


def link_code(paths: Collection[str], sha256: str, shared: Path, job: str) -> None:
    """Link the files of `code/<sha256>` that have these paths, and remove links of other code.

    Raises UserError where the job has written something in the place of a file, OSError for the volume.
    """
    work, record = shared / "work" / job, shared / "work" / f".{job}" / CODE
    for folder in (work, record.parent):
        folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(record.parent, time.time())
    known = read_json(record) or {}
    is_linked = known.get("sha256") == sha256
    if not is_linked:
        if isinstance(known.get("sha256"), str):
            mark_used(shared / "code" / known["sha256"])
        before = known.get("paths")
        earlier = {path for path in before if isinstance(path, str)} if isinstance(before, list) else set()
        _write(record, None, earlier.union(paths))
        _remove_links(work, earlier.difference(paths))
    targets = {path: str(shared / "code" / sha256 / path) for path in paths}
    plan = plan_links(targets, _look(work, paths))
    if plan.taken and not is_linked:
        raise UserError(_refusal(work, plan.taken))
    if plan.taken:  # by this very code, in an earlier attempt
        log(f"kept what the job has written in the place of its code: {_listed(plan.taken)}")
    for path in plan.remove:
        (work / path).unlink(missing_ok=True)
    for path in plan.make:
        _link(targets[path], work / path, record)
    if not is_linked:
        _write(record, sha256, paths)


def _look(work: Path, paths: Collection[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in sorted({parent for path in paths for parent in _parents(path)}):
        if found.keys().isdisjoint(_parents(folder)) and ((work / folder).is_symlink() or not (work / folder).is_dir()):
            found |= _entry(work, folder)
    for path in paths:
        if found.keys().isdisjoint(_parents(path)):
            found |= _entry(work, path)
    return found


def _entry(work: Path, path: str) -> dict[str, str | None]:
    try:
        return {path: str((work / path).readlink())}
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno != errno.EINVAL:  # no link
            raise
        return {path: None}


def _remove_links(work: Path, paths: Collection[str]) -> None:
    """Remove those that were made here, and folders that are empty then but for bytecode."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if is_code_link(path, _entry(work, path).get(path)):
                (work / path).unlink()
    for folder in sorted({parent for path in paths for parent in _parents(path)}, reverse=True):
        with contextlib.suppress(OSError):  # it has files of the job, or is gone
            if [entry.name for entry in (work / folder).iterdir()] == ["__pycache__"]:
                shutil.rmtree(work / folder / "__pycache__")
            (work / folder).rmdir()


def _link(target: str, path: Path, record: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.suppress(FileExistsError):
            path.symlink_to(target)
            return
        new = beside(record)
        new.symlink_to(target)
        new.replace(path)
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise UserError(
                f"the volume has no symbolic links ({path}: {error.strerror}), which submitted code needs; use another "
                "storage class, or put the code into the image"
            ) from error
        raise


def _write(record: Path, sha256: str | None, paths: Collection[str]) -> None:
    """`sha256` is None while not all links are made."""
    new = beside(record)
    new.write_text(json.dumps({"sha256": sha256, "paths": sorted(paths)}))
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
