"""Which files make a folder a repository of git, Mercurial or Subversion.

A repository has settings that name programs, and `git status` runs them (git-config, core.fsmonitor). A prompt or an
editor may run that in any folder, so a file of another author must never be part of one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

_NAMES = (".git", ".hg", ".svn", "git~1")
"""The last one is another name of the first, on NTFS."""
OF_BARE = ("HEAD", "commondir", "objects", "refs")
"""By which git knows a repository that is no folder `.git` (git, setup.c, is_git_directory)."""
_FOLDED = {name.casefold(): name for name in OF_BARE}
_IGNORED_ON_HFS = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
"""Two names that differ by these alone are the same file on macOS (git, utf8.c, next_hfs_char)."""


def is_repository(name: str) -> bool:
    """Whether a file or folder of this name is a repository, on file systems that ignore case, too."""
    return _IGNORED_ON_HFS.sub("", name).casefold().rstrip(". ") in _NAMES


def has_bare_repository(names: Collection[str]) -> bool:
    """Whether a folder with these names of `OF_BARE` is a git repository itself, without a folder `.git`."""
    return "HEAD" in names and ("commondir" in names or ("objects" in names and "refs" in names))


def file_of_repository(paths: Iterable[str]) -> str | None:
    """One of these paths, with `/`, that is part of a repository."""
    bare: dict[str, dict[str, str]] = defaultdict(dict)
    for path in paths:
        start = 0
        for name in path.split("/"):
            if is_repository(name):
                return path
            if (known := _FOLDED.get(name.casefold())) is not None:
                bare[path[:start].casefold()][known] = path
            start += len(name) + 1
    return next((next(iter(names.values())) for names in bare.values() if has_bare_repository(names)), None)
