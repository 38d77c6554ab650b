"""When a snapshot is saved: every so many steps, epochs or seconds, or as often as `auto` finds worth it.

Steps and epochs are the same on every rank. Time is not: rank 0 decides and the others must follow, without a
collective in every step. So the ranks check together only at agreed steps, and each check also agrees on the next one,
half of the remaining time away at the pace just seen, and at most MOST_STEPS: they may be slower from the next one on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.trust.fence import Attempt, history
from ddp_trainer.snapshots.values import ChosenInterval, Progress, SnapshotEvent

log = logging.getLogger(__name__)

_PATTERN = re.compile(r"([1-9][0-9]{0,8})\s*(step|epoch|second)s?")
AUTO_BEGINS_WITH = 60
"""Seconds until the first save of `auto`, which then knows what one costs."""
MOST_STEPS = 128
"""Between two checks. Each is a broadcast over gloo: more of them would show beside steps of a millisecond."""
EPOCH_SECONDS = 1800.0
"""After so long without the end of an epoch, a line says what has to say that there was one."""
Unit = Literal["steps", "epochs", "seconds", "auto"]


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """A snapshot every `count` of `unit`; for `auto` the count is what the interval starts with, in seconds."""

    count: int
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> SaveInterval:
        """From `100steps`, `2epochs`, `60seconds` or `auto`. Raises UserError."""
        if text.strip() == "auto":
            return cls(AUTO_BEGINS_WITH, "auto")
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UserError(
                f"DDPJOB_SNAPSHOT_EVERY={text!r} is not an interval: write a whole number and its unit, "
                "such as 100steps, 2epochs or 60seconds, or auto"
            )
        unit: Unit = {"step": "steps", "epoch": "epochs", "second": "seconds"}[match[2]]  # type: ignore[assignment]
        return cls(int(match[1]), unit)

    @property
    def is_timed(self) -> bool:
        """Whether only a clock can tell, so that ranks have to agree."""
        return self.unit in ("seconds", "auto")

    def is_due(self, *, step: int, before: int, epoch: int, epoch_end: bool) -> bool:
        """For steps and epochs: whether to save after this step, which came after that of the number `before`. `epoch`
        counts whole epochs, this one included at its end.
        """
        if self.unit == "steps":
            return step // self.count > before // self.count
        return self.unit == "epochs" and epoch_end and epoch % self.count == 0

    def __str__(self) -> str:
        return "auto" if self.unit == "auto" else f"{self.count}{self.unit}"


class TimedInterval:
    """Rank 0's side of a timed interval: whether to save now, and at which step to look again. Times are monotonic
    seconds.
    """

    def __init__(self, seconds: float, *, step: int, now: float) -> None:
        self.seconds = seconds
        self._saved_at = now
        self._looked_at = now
        self._looked_step = step

    def since_save(self, now: float) -> float:
        """Seconds since the last save, or the begin."""
        return now - self._saved_at

    def go_on(self, *, step: int, now: float, since_save: float) -> None:
        """After a break: the pace is measured anew, the interval is not."""
        self._saved_at = now - since_save
        self._looked_at, self._looked_step = now, step

    def saved(self, now: float) -> None:
        """The ranks save now, which rank 0 has decided."""
        self._saved_at = now

    def look(self, *, step: int, now: float) -> tuple[bool, int]:
        """(save now?, step of the next look)."""
        pace = (now - self._looked_at) / max(1, step - self._looked_step)
        self._looked_at, self._looked_step = now, step
        due = now - self._saved_at >= self.seconds
        remaining = self.seconds - (0.0 if due else now - self._saved_at)
        return due, step + steps_to_next_check(remaining, pace)


def steps_to_next_check(remaining: float, pace: float) -> int:
    """Half the remaining time at `pace` seconds a step; near the end all of it, and from one step to MOST_STEPS."""
    if pace <= 0:
        return 1
    steps = remaining / pace
    return max(1, min(MOST_STEPS, math.floor(steps if steps < 4 else steps / 2)))


PRIOR_NODE_MTTF_SECONDS = 24 * 3600.0
"""What is assumed of a node before it has shown anything else: one failure a day."""
MAX_OVERHEAD = 0.035
"""Share of time that saving may stop training (CheckFreq, FAST '21, reports 3.5 % as the price users accept)."""
SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 3600.0


def choose(
    *, stall_seconds: float, save_seconds: float, nodes: int, observed_seconds: float, failures: int
) -> ChosenInterval:
    """Young's interval, T = sqrt(2 · MTTF · stall) (CACM 17(9), 1974), within bounds.

    `stall_seconds` is what one save stops training for, `save_seconds` how long it then takes in the background: a
    new one cannot start earlier. The MTTF of the job is its nodes' divided by their number, and a node's is
    estimated from `failures` seen in `observed_seconds` of the job's life together with the prior, which counts as
    one failure in 24 hours of one node: (24 h + nodes · observed) / (1 + failures).
    """
    node_mttf = (PRIOR_NODE_MTTF_SECONDS + nodes * observed_seconds) / (1 + failures)
    mttf = node_mttf / nodes
    young = math.sqrt(2 * mttf * stall_seconds)
    floors = {"overhead": stall_seconds / MAX_OVERHEAD, "save": save_seconds, "shortest": SHORTEST_SECONDS}
    floor = max(floors, key=lambda name: floors[name])
    seconds, bound = young, None
    if seconds > LONGEST_SECONDS:
        seconds, bound = LONGEST_SECONDS, "longest"
    if seconds < floors[floor]:
        seconds, bound = floors[floor], floor
    return ChosenInterval(seconds, mttf, stall_seconds, save_seconds, failures, bound)


class SaveSchedule:
    """Asks `every` after each step. Times are looked at together at agreed steps only; see `every`."""

    def __init__(
        self, every: SaveInterval, ranks: Ranks, directory: Path, *, nodes: int, uid: str | None = None
    ) -> None:
        """`uid` is the job's: earlier ones of the name have left attempts in `directory` too. None counts all."""
        self.every = every
        self._uid = uid
        self._ranks = ranks
        self._directory = directory
        self._nodes = nodes
        self._timetable: TimedInterval | None = None
        self._next_look = 0
        self._step = 0
        """The last one that has ended. With several optimizers, Lightning counts more than one for each batch."""
        self._history: Sequence[Attempt] = ()
        self._awaited_since: float | None = None
        """The end of an epoch, where it decides and none has come."""

    def start(self, step: int) -> None:
        """Training begins after `step` finished steps; intervals of time are counted from now."""
        self._step = step
        if self.every.is_timed:
            self._timetable = TimedInterval(float(self.every.count), step=step, now=time.monotonic())
            self._next_look = step + 1
        elif self.every.unit == "epochs" and self._ranks.rank == 0:
            self._awaited_since = time.monotonic()
        self._read_history()

    def go_on(self, step: int) -> None:
        """Training goes on after `step` steps in another process group, which may have a new rank 0. A collective.

        Intervals of time go on: where ranks come and go more often, there would be no snapshot otherwise.
        """
        if self._timetable is None:
            self.start(step)
        else:
            self._read_history()
        if self._timetable is not None:
            now = time.monotonic()
            since_save = max(self._ranks.values(self._timetable.since_save(now)))  # a new rank does not know
            self._timetable.go_on(step=step, now=now, since_save=since_save)
            self._next_look = step + 1

    def _read_history(self) -> None:
        if self.every.unit == "auto" and self._ranks.rank == 0 and not self._history:
            # Now, not at each save: the thread that trains never waits for the volume, and a later attempt fences this
            # one. Without its history an interval is as good as that of a first attempt.
            with contextlib.suppress(OSError), storage_awaited():
                self._history = [attempt for attempt in history(self._directory) if self._uid in (None, attempt.uid)]

    def after(self, progress: Progress, *, epoch_end: bool) -> bool:
        """Whether to save after this step. Raises RuntimeError before `start`."""
        if self.every.is_timed:
            return self._is_time(progress.step)
        if self._awaited_since is not None:
            self._await_epoch(epoch_end=epoch_end)
        before, self._step = self._step, progress.step
        return self.every.is_due(step=progress.step, before=before, epoch=progress.epoch, epoch_end=epoch_end)

    def _await_epoch(self, *, epoch_end: bool) -> None:
        assert self._awaited_since is not None
        waits = not epoch_end and time.monotonic() - self._awaited_since < EPOCH_SECONDS
        if not epoch_end and not waits:
            log.warning(
                "snapshots are saved every %s, and no step has ended an epoch for %.0f minutes: the last step_end of "
                "an epoch gets epoch_end=True, or there will be none; or save every so many steps or seconds",
                self.every,
                EPOCH_SECONDS / 60,
            )
        if not waits:
            self._awaited_since = None

    def saved(self, event: SnapshotEvent) -> SnapshotEvent:
        """Learn from a save what the next interval is to be; the event, with `interval` if one was chosen."""
        if self.every.unit != "auto" or self._timetable is None:
            return event
        interval = self._interval(event)
        self._timetable.seconds = interval.seconds
        return replace(event, interval=interval)

    def _interval(self, saved: SnapshotEvent) -> ChosenInterval:
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
        now = time.monotonic()
        is_due, next_look = self._timetable.look(step=step, now=now)
        is_due_first, self._next_look = self._ranks.numbers_from_first(int(is_due), next_look)
        if is_due_first:
            self._timetable.saved(now)
        return bool(is_due_first)
