"""Training between two interruptions: which steps are finished, and which snapshot is the newest, at any moment."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUNDING = 1e-6
"""Seconds by which sums of times may be off."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps one after the other from `begin`, with a snapshot after every `every` of them. Times in seconds."""

    begin: float
    first: int
    """Steps that were finished before it."""
    step_seconds: float
    every: int
    since: int
    """Steps since the last snapshot, when it began."""
    stall_seconds: float
    save_seconds: float

    def finished(self, now: float) -> int:
        """Steps that are finished at `now`, with those before."""
        lead = self.every - self.since
        elapsed = max(0.0, now - self.begin) + _ROUNDING
        beyond = elapsed - lead * self.step_seconds
        if beyond < 0:
            return self.first + int(elapsed / self.step_seconds)
        cycles = int(beyond / self._cycle)
        rest = max(0.0, beyond - cycles * self._cycle - self.stall_seconds)
        return self.first + lead + cycles * self.every + min(self.every, int(rest / self.step_seconds))

    def newest_snapshot(self, now: float) -> int | None:
        """Step of the newest verified snapshot that it has made by `now`; None if there is none."""
        lead = self.every - self.since
        beyond = now - self.begin + _ROUNDING - lead * self.step_seconds - self.stall_seconds - self.save_seconds
        return None if beyond < 0 else self.first + lead + math.floor(beyond / self._cycle) * self.every

    def since_snapshot(self, now: float) -> int:
        """Steps finished at `now` since a snapshot was last begun."""
        return (self.finished(now) - self.first + self.since) % self.every

    def stalls(self, now: float) -> int:
        """Snapshots whose stall is over at `now`."""
        beyond = now - self.begin + _ROUNDING - (self.every - self.since) * self.step_seconds - self.stall_seconds
        return 0 if beyond < 0 else math.floor(beyond / self._cycle) + 1

    @property
    def _cycle(self) -> float:
        return self.stall_seconds + self.every * self.step_seconds
