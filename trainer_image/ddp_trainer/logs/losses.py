"""The loss of each step: a file for each attempt in logs/<job>/losses, merged when it is read.

    losses/001763704000-000000-0b0c.jsonl     named like the attempt's fencing token, so names sort as attempts do
    {"attempt": 0, "resumedAfter": 0}
    {"step": 1, "epoch": 0, "loss": 2.302585, "attempt": 0, "samplesPerSecond": 812.5}

An attempt only appends to a file of its own, so a fenced attempt that still runs spoils nothing. `resumedAfter` N makes
void what earlier lines say of steps after N. The log is a state of the snapshot: the thread that writes one makes the
lines so far durable, and those that the volume refuses go into the snapshot itself.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ddp_trainer.logs.log_files import LogFile, LogThread, WriteErrors

FOLDER = "losses"
EVENTS = "events.jsonl"
FLUSH_SECONDS = 1.0
RECENT_LINES = 1000


def read_losses(log_dir: Path) -> list[dict[str, Any]]:
    """The merged history of all attempts in `log_dir` (logs/<job>): each step once, in order."""
    return list(merged_losses(log_dir))


def merged_losses(log_dir: Path) -> Iterator[dict[str, Any]]:
    """The same one by one: a long run may have more of them than there is memory. The files are read twice."""
    paths = sorted((log_dir / FOLDER).glob("*.jsonl"))
    begins: list[float] = []
    late = [line for line in _lines(paths, begins) if line.is_late]
    # of each part, the last step that no later one has made void
    valid = list(accumulate(reversed([*begins[1:], math.inf]), min))[::-1]
    again = {line.step: line.entry for line in late if line.step <= valid[line.part]}
    first = (
        line.entry
        for line in _lines(paths, [])
        if not line.is_late and line.part < len(valid) and line.step <= valid[line.part] and line.step not in again
    )
    return merge(first, [again[step] for step in sorted(again)], key=itemgetter("step"))


class _Line(NamedTuple):
    """One step of the run, in one of its parts, which begin with a `resumedAfter`."""

    part: int
    step: int
    entry: dict[str, Any]
    is_late: bool
    """It is of a step that its part does not begin after, or has had: a line that a snapshot brought. They are few."""


def _lines(paths: Sequence[Path], begins: list[float]) -> Iterator[_Line]:
    """Those of all attempts. `begins` gets the step after which each part begins."""
    for path in paths:
        begins.append(math.inf)  # lines before the first `resumedAfter` make nothing void
        last = math.inf
        for entry in _entries(path):
            if isinstance(after := entry.get("resumedAfter"), int):
                begins.append(after)
                last = after
            elif isinstance(step := entry.get("step"), int):
                yield _Line(len(begins) - 1, step, entry, is_late=step <= last)
                last = max(last, step)


def read_epochs(log_dir: Path) -> list[dict[str, Any]]:
    """The figures of each epoch, in order, as the last attempt that finished it has them. An attempt makes void what
    earlier ones, or an earlier job of the name, have written of steps after the one that it begins at.
    """
    found: dict[int, dict[str, Any]] = {}
    path = log_dir / EVENTS
    for entry in _entries(path) if path.exists() else ():
        match entry:
            case {"event": "started" | "resumed", "step": int(begins_at)}:
                found = {epoch: figures for epoch, figures in found.items() if figures["step"] <= begins_at}
            case {"event": "epoch", "epoch": int(epoch), "step": int()}:
                found[epoch] = {name: value for name, value in entry.items() if name not in ("event", "time")}
    return [found[epoch] for epoch in sorted(found)]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one attempt; one that a crash cut short is left out."""
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


class LossLog:
    """Writes the losses of one attempt; `path` is None on all ranks but rank 0. A Stateful of the snapshot."""

    def __init__(
        self,
        path: Path | None,
        attempt: int,
        write_errors: WriteErrors | None = None,
        thread: LogThread | None = None,
        *,
        may_lead: bool = False,
    ) -> None:
        """`may_lead`: this rank may become rank 0 later (`lead`), with live recovery."""
        self._file = None if path is None else LogFile(path, thread or LogThread(), write_errors or WriteErrors())
        self._attempt = attempt
        self._asked_at = time.monotonic()
        self._restored: Sequence[str] = ()
        self._recent: deque[str] | None = deque(maxlen=RECENT_LINES) if may_lead else None
        """The last lines: the rank that writes may be lost with lines that it has not written out."""
        self.last_step = 0
        self.last_loss: float | None = None
        self.epoch: int | None = None
        """The one of the last losses; None where none has been since the last mean was taken."""
        self._sum, self._count = 0.0, 0
        self.before_save: Callable[[], None] = lambda: None
        """Called when a snapshot is taken, to append what is still on its way."""

    def lead(self, file: LogFile | None) -> None:
        """This rank is rank 0 now, and writes; or it is not any more, and writes what it still has. Call it before
        `resumed`.
        """
        if self._file is not None:
            self._file.write_soon()
        self._file = file
        self._restored = list(self._recent or ()) if file is not None else ()

    def resumed(self, step: int) -> None:
        """Training goes on after `step`, 0 for a new run. Call it once, before the first `append`."""
        self.last_step = step
        if self._file is not None:
            self._file.lines.add(json.dumps({"attempt": self._attempt, "resumedAfter": step}))
            for line in self._restored:
                self._file.lines.add(line.removesuffix("\n"))
        self._restored = ()

    def append(self, *, step: int, epoch: int, loss: float, samples_per_second: float | None = None) -> None:
        """Log the mean loss of one finished step, and the throughput so far; written out about once a second."""
        self.last_step, self.last_loss = step, loss
        if epoch != self.epoch:
            self.epoch, self._sum, self._count = epoch, 0.0, 0
        self._sum += loss
        self._count += 1
        if self._file is None and self._recent is None:
            return
        # repr of a float reads back as the same bits; JSON has no word for NaN
        value = loss if math.isfinite(loss) else None
        entry: dict[str, Any] = {"step": step, "epoch": epoch, "loss": value, "attempt": self._attempt}
        if samples_per_second is not None:
            entry["samplesPerSecond"] = float(f"{samples_per_second:.4g}")
        line = json.dumps(entry)
        if self._recent is not None:
            self._recent.append(line)
        if self._file is None:
            return
        self._file.lines.add(line)
        if time.monotonic() - self._asked_at >= FLUSH_SECONDS:
            self._asked_at = time.monotonic()
            self._file.write_soon()

    def epoch_mean(self) -> float:
        """The mean loss of the steps of `epoch`, in all attempts, once: the next epoch begins."""
        self.epoch = None
        return self._sum / self._count

    def state_dict(self) -> dict[str, Any]:
        """`waiting` are lines that the volume refuses: none, unless the thread that writes the snapshot finds some."""
        # imported here: it needs torch, and reading losses does not
        from ddp_trainer.snapshots.codec.structure import Deferred

        self.before_save()
        state = {"step": self.last_step, "epoch": self.epoch, "sum": self._sum, "count": self._count}
        if self._file is None:
            return {**state, "waiting": []}
        so_far = functools.partial(_made_durable, self._file, self._file.lines.added)
        return {**state, "waiting": Deferred(so_far)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over lines that were only in the snapshot, and what the epoch has so far; older images have not saved
        that.
        """
        self._restored = [*self._restored, *state.get("waiting", ())]
        self.epoch, self._sum, self._count = state.get("epoch"), state.get("sum", 0.0), state.get("count", 0)

    def close(self) -> None:
        """Write out what waits and let go of the file. Waits for the volume: not for the training thread."""
        if self._file is not None:
            self._file.close()


def _made_durable(file: LogFile, first: int) -> Sequence[str]:
    """Make the `first` lines outlive a crash of the node; those that the volume refuses."""
    file.write(durable=True)
    return file.lines.not_durable(first)
