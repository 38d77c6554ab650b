"""Whether a rank whose steps say nothing does anything: the CPU time and the input and output of its processes.

A long validation, a compilation, a download or a save computes, reads or writes. A rank that waits for a peer in gloo
does none of these; one that waits in NCCL polls, and is ended by NCCL's own timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ddp_trainer.contract import processes

LONGEST_LOOK_SECONDS: Final = 5.0
LOOKS_PER_ALLOWANCE: Final = 4


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    usage: processes.Usage
    active_at: float


class Activity:
    """When each rank was last active, by the pid of its first process; times are monotonic seconds.

    `allowance` is for how long a rank may be inactive, in seconds.
    """

    def __init__(self, allowance: float) -> None:
        self.look_seconds = min(LONGEST_LOOK_SECONDS, allowance / LOOKS_PER_ALLOWANCE)
        self._looks: dict[int, _Look] = {}
        self._disturbed = False
        self._disturbing = 0

    def by_pid(self, pids: Iterable[int], now: float, *, again: bool = False) -> dict[int, float]:
        """When each of `pids` was last active. What nobody has looked at counts as active: all since the last look,
        which is up to `look_seconds` old unless they are looked at `again`.
        """
        if not self._disturbing:
            self._looks = {pid: self._look(pid, now, again) for pid in pids}
            self._disturbed = False
        return {pid: now - (look.at - look.active_at) for pid, look in self._looks.items()}

    @contextmanager
    def disregarded(self) -> Iterator[None]:
        """What the ranks do meanwhile is not their own: the launcher makes them write their stacks.

        Another thread may call this.
        """
        self._disturbing += 1
        self._disturbed = True
        try:
            yield
        finally:
            self._disturbed = True
            self._disturbing -= 1

    def _look(self, pid: int, now: float, again: bool) -> _Look:
        before = self._looks.get(pid)
        if before is not None and now - before.at < self.look_seconds and not self._disturbed and not again:
            return before
        usage = processes.usage(pid)
        if before is not None and self._disturbed:
            return _Look(now, usage, before.active_at)
        if before is None or processes.is_active(before.usage, usage, now - before.at):
            return _Look(now, usage, active_at=now)
        return _Look(now, usage, before.active_at)
