"""What a run leaves to read in logs/<job> on the volume, written by rank 0 alone.

    losses.jsonl    one line a step, the loss exact to the last bit; each step once, however often the run was killed
    events.jsonl    started, resumed, validated, snapshots, preempted, finished; of every attempt
    tensorboard/    loss, learning rate, throughput and validation, for `tensorboard --logdir`

The loss log is part of what a snapshot saves: taking one writes out what is buffered, and resuming from one
cuts the log back to it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ddp_trainer.distributed import World
from ddp_trainer.heartbeat import Heartbeat
from ddp_trainer.snapshots.session import SnapshotEvent

FLUSH_SECONDS = 1.0


class LossLog:
    """losses.jsonl. A Stateful of the snapshot: `state_dict` makes its lines safe, `load_state_dict` drops
    later ones.
    """

    def __init__(self, path: Path | None, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._lines: list[str] = []
        self._file: IO[str] | None = None
        self._written_at = time.monotonic()
        self.last_step = 0
        self.last_loss: float | None = None
        self.before_save: Callable[[], None] = lambda: None
        """Called when a snapshot is taken, to append what is still on its way."""

    def append(self, *, step: int, epoch: int, loss: float) -> None:
        """Note the mean loss of one finished step; written out about once a second."""
        self.last_step, self.last_loss = step, loss
        if self._path is None:
            return
        # repr of a float reads back as the same bits; JSON has no word for NaN
        value = loss if math.isfinite(loss) else None
        self._lines.append(json.dumps({"step": step, "epoch": epoch, "loss": value, "attempt": self._attempt}) + "\n")
        if time.monotonic() - self._written_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Write out what is buffered; `durable` waits until it would outlive a crash of the node."""
        self._written_at = time.monotonic()
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
        self._file.writelines(self._lines)
        self._lines.clear()
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def rewind(self, step: int) -> None:
        """Drop every line after `step`, and a last line that a crash cut short."""
        self._lines.clear()
        self.last_step, self.last_loss = step, None
        if self._path is None or not self._path.exists():
            return
        keep = 0
        with self._path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n") or _step_of(line) > step:
                    break
                keep += len(line)
        os.truncate(self._path, keep)

    def state_dict(self) -> dict[str, Any]:
        self.before_save()
        self.flush(durable=True)
        return {"step": self.last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rewind(state["step"])

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


class RunLog:
    """All logs of a run, on rank 0; on the other ranks the same calls do nothing.

    A volume that cannot be written to does not end training: it is said once on stderr.
    """

    def __init__(self, directory: Path, world: World, attempt: int = 0) -> None:
        self._directory = directory if world.leads else None
        self._attempt = attempt
        self._writer: Any = None
        self._resumed_at = 0
        self.losses = LossLog(directory / "losses.jsonl" if world.leads else None, attempt)

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        if self._directory is None:
            return
        line = json.dumps({"time": time.time(), "attempt": self._attempt, "event": kind, **facts}, default=str)
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "events.jsonl").open("a") as events:
            events.write(line + "\n")

    def resumed(self, step: int) -> None:
        """Training goes on after `step`; TensorBoard drops what an earlier life drew beyond it."""
        self._resumed_at = step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each TensorBoard curve."""
        if self._directory is None:
            return
        if self._writer is None:
            # The import takes 0.2 s: after the first steps, not before them.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(self._directory / "tensorboard"),
                purge_step=self._resumed_at + 1 if self._resumed_at else None,
            )
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def say(self, text: str) -> None:
        """A line for people, from one rank."""
        if self._directory is not None:
            print(text, flush=True)

    def close(self) -> None:
        self.losses.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class SnapshotReporter:
    """Passes on what the snapshots say of themselves: to the heartbeat, for /status and metrics, and to the
    log.
    """

    def __init__(self, heartbeat: Heartbeat, log: RunLog) -> None:
        self._heartbeat = heartbeat
        self._log = log

    def __call__(self, event: SnapshotEvent) -> None:
        saved = event.manifest if event.result in ("saved", "resumed") else None
        self._heartbeat.snapshot(
            step=saved.step if saved else None,
            time=saved.time if saved else None,
            # its checksums are those of the files as they were read back
            verified=saved is not None,
            stall_seconds=event.stall_seconds or None,
            save_seconds=event.save_seconds or None,
            result=event.result if event.result in ("saved", "failed", "skipped") else None,
        )
        self._log.event(f"snapshot_{event.result}", step=event.step, message=event.message)
        if event.result not in ("saved", "resumed"):
            self._log.say(event.message)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
