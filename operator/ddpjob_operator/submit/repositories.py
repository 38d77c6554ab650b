"""Which files make a folder a repository of git, Mercurial or Subversion.

A repository has settings that name programs, and `git status` runs them (git-config, core.fsmonitor). A prompt or an
editor may run that in any folder, so a file of another author must never be part of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MOST_HEAD_BYTES = 255
"""Of a file HEAD, what git reads (git, setup.c, validate_headref)."""
_NAMES = (".git", ".hg", ".svn", "git~1")
"""The last one is another name of the first, on NTFS."""
_HEAD = re.compile(rb"ref:\s*refs/|[0-9a-fA-F]{40}")
"""How a file HEAD begins, without which git takes no folder for a repository, also none that is not called .git."""
_IGNORED_ON_HFS = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
"""Two names that differ by these alone are the same file on macOS (git, utf8.c, next_hfs_char)."""


def is_repository(name: str) -> bool:
    """Whether a file or folder of this name is a repository, on file systems that ignore case, too."""
    return _folded(name) in _NAMES


def is_named_head(name: str) -> bool:
    return _folded(name) == "head"


def is_head(content: bytes) -> bool:
    """Whether a file HEAD with this content may make its folder a git repository."""
    return _HEAD.match(content[:MOST_HEAD_BYTES]) is not None


def file_of_repository(files: Mapping[str, bytes]) -> str | None:
    """One of these paths, with `/`, that is part of a repository; each has its content."""
    for path, content in files.items():
        *folders, name = path.split("/")
        if any(map(is_repository, (*folders, name))) or (is_named_head(name) and is_head(content)):
            return path
    return None


def _folded(name: str) -> str:
    return _IGNORED_ON_HFS.sub("", name).casefold().rstrip(". ")
