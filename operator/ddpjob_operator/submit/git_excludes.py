"""The lists of a git repository beside its .gitignore files: what one clone, or all repositories of a user, ignore."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ddpjob_operator.home import expanded

_OF_ANOTHER_REPOSITORY = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR"})
"""Variables that a hook of git has."""


def lists_of_git(repository: Path) -> tuple[Path, Path]:
    """core.excludesFile and info/exclude, in the order in which git reads them; either may not be there.

    git itself knows where they are: a worktree shares the one, and the other is in a configuration of several files.
    Where git is not installed, or refuses the repository, these are the usual places.
    """
    of_user = _answer(repository, "config", "--type=path", "--get", "core.excludesFile")
    of_clone = _answer(repository, "rev-parse", "--git-path", "info/exclude")
    return (
        repository / (_usual_of_user() if of_user is None else of_user),
        repository / (".git/info/exclude" if of_clone is None else of_clone),
    )


def _usual_of_user() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or expanded(Path("~/.config"))) / "git" / "ignore"


def _answer(repository: Path, *question: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_REPOSITORY}
    environment["GIT_CEILING_DIRECTORIES"] = str(repository.absolute().parent)  # nor one around it
    try:
        done = subprocess.run(
            ["git", "-C", repository, *question],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return os.fsdecode(done.stdout).removesuffix("\n")
