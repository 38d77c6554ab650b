"""Paths that begin with ~, as a file or a quoted option may have them."""

from __future__ import annotations

from pathlib import Path


def expanded(path: Path) -> Path:
    """With the home directory in place of ~. Where there is none, of a user without an account or of a name that no
    account has, the path is as it was, as in a shell.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        return path
