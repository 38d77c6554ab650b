"""Archives of code as the command line makes them, and some that it never would."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_trainer.contract.environment import SubmittedCode

Alter = Callable[[tarfile.TarInfo], None]


def digest_of(files: Mapping[str, str | bytes], executable: frozenset[str] = frozenset()) -> str:
    """The digest as docs/contracts.md section 2 has it, computed once more."""
    lines = ""
    for path in sorted(files, key=str.encode):
        mode, sha256 = "755" if path in executable else "644", hashlib.sha256(_bytes(files[path])).hexdigest()
        lines += f"{mode} {sha256} {path}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def archive(path: Path, files: Mapping[str, str | bytes], *, alter: Alter = lambda _: None, mode: int = 0o644) -> None:
    """One archive; `alter` changes the header of each file."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, "w:gz") as members:
        for name, text in files.items():
            member, content = tarfile.TarInfo(name), _bytes(text)
            member.size, member.mode, member.mtime = len(content), mode, 1
            alter(member)
            members.addfile(member, io.BytesIO(content))


def submitted(folder: Path, files: Mapping[str, str | bytes], requirements: str | None = None) -> SubmittedCode:
    """These files in `folder`, in two archives if there are two files."""
    paths = sorted(files)
    for number, part in enumerate((paths[::2], paths[1::2])):
        archive(folder / f"{number:02d}.tar.gz", {path: files[path] for path in part})
    return SubmittedCode(folder, digest_of(files), requirements)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
