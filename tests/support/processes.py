"""Processes of this machine, as tests look at them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support.waiting import eventually


def has_ended(pid: int) -> bool:
    """Whether it is gone, or only waits to be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_end(pids: Iterable[int]) -> None:
    """Wait until every one of these processes has ended."""
    left = set(pids)

    def none_left() -> bool:
        left.difference_update([pid for pid in left if has_ended(pid)])
        return not left

    eventually(none_left, "all processes have ended", instead=lambda: f"left: {sorted(left)}")
