"""Whether it is time for a snapshot: the same answer on every rank, and with `auto` an interval that follows from what
saving and failing have cost so far.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_trainer.snapshots.interval import Interval, SaveInterval, TimedInterval, choose
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.trust.fence import Attempt, history
from ddp_trainer.snapshots.values import Progress, SnapshotEvent


class SaveSchedule:
    """Asks `every` after each step. Times are looked at together at agreed steps only; see `every`."""

    def __init__(self, every: SaveInterval, ranks: Ranks, directory: Path, *, nodes: int) -> None:
        self.every = every
        self._ranks = ranks
        self._directory = directory
        self._nodes = nodes
        self._timetable: TimedInterval | None = None
        self._next_look = 0
        self._history: Sequence[Attempt] = ()

    @property
    def seconds(self) -> float | None:
        """The interval of time as it is now; None where steps or epochs are counted."""
        return None if self._timetable is None else self._timetable.seconds

    def start(self, step: int) -> None:
        """Training begins after `step` finished steps; intervals of time are counted from now."""
        if self.every.is_timed:
            self._timetable = TimedInterval(float(self.every.count), step=step, now=time.monotonic())
            self._next_look = step + 1
        if self.every.unit == "auto" and self._ranks.rank == 0:
            # Now, not at each save: the thread that trains never waits for the volume, and a later attempt fences this
            # one. Without its history an interval is as good as that of a first attempt.
            with contextlib.suppress(OSError):
                self._history = history(self._directory)

    def after(self, progress: Progress, *, epoch_end: bool) -> bool:
        """Whether to save after this step. Raises RuntimeError before `start`."""
        if self.every.is_timed:
            return self._is_time(progress.step)
        return self.every.is_due(step=progress.step, epoch=progress.epoch, epoch_end=epoch_end)

    def saved(self, event: SnapshotEvent) -> SnapshotEvent:
        """Learn from a save what the next interval is to be; the event, with `interval` if one was chosen."""
        if self.every.unit != "auto" or self._timetable is None:
            return event
        interval = self._interval(event)
        self._timetable.seconds = interval.seconds
        return replace(event, interval=interval)

    def _interval(self, saved: SnapshotEvent) -> Interval:
        """What `auto` chooses from the cost of the save just made and the attempts this job has needed so far."""
        times = [attempt.time for attempt in self._history if attempt.time is not None]
        return choose(
            stall_seconds=saved.stall_seconds,
            save_seconds=saved.save_seconds,
            nodes=self._nodes,
            observed_seconds=max(0.0, time.time() - min(times)) if times else 0.0,
            failures=max(0, len(self._history) - 1),
        )

    def _is_time(self, step: int) -> bool:
        if self._timetable is None:
            raise RuntimeError("call resume() before the first step: ranks agree on a clock there")
        if step < self._next_look:
            return False
        is_due, next_look = self._timetable.look(step=step, now=time.monotonic())
        is_due_first, self._next_look = self._ranks.numbers_from_first(int(is_due), next_look)
        return bool(is_due_first)
