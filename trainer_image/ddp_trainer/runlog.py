"""What a run leaves to read in logs/<job> on the volume, written by rank 0 alone.

    losses.jsonl    one line a step, the loss exact to the last bit; each step once, however often the run was killed
    events.jsonl    started, resumed, validated, snapshots, preempted, finished; of every attempt
    tensorboard/    loss, learning rate, throughput and validation, for `tensorboard --logdir`
    wandb/          the same for W&B, with `--wandb offline`

The loss log is part of what a snapshot saves: taking one writes out what is buffered, and resuming from one
cuts the log back to it. A volume that refuses does not end training: that is said once, and lines wait in memory.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_trainer.curves import Curves, OfflineWandb, TensorBoard
from ddp_trainer.distributed import World
from ddp_trainer.heartbeat import Heartbeat
from ddp_trainer.line_file import LineFile
from ddp_trainer.snapshots.interval import Interval
from ddp_trainer.snapshots.values import SnapshotEvent

FLUSH_SECONDS = 1.0


class Complaints:
    """Says on stderr which logs cannot be written, each once until it can be again."""

    def __init__(self) -> None:
        self._refused: set[Path] = set()

    def about(self, path: Path, error: OSError) -> None:
        if path not in self._refused:
            self._refused.add(path)
            self._say(
                f"{path} cannot be written: {error.strerror or error}. Training goes on, and lines wait in memory; "
                "free space on the volume or enlarge it"
            )

    def over(self, path: Path) -> None:
        if path in self._refused:
            self._refused.discard(path)
            self._say(f"{path} can be written again")

    def _say(self, text: str) -> None:
        print(f"ddp_trainer: {text}", file=sys.stderr, flush=True)


class LossLog:
    """losses.jsonl. A Stateful of the snapshot: `state_dict` makes its lines safe, on the volume or in the snapshot
    itself, `load_state_dict` drops later ones.
    """

    def __init__(self, path: Path | None, attempt: int, complaints: Complaints | None = None) -> None:
        self._file = None if path is None else LineFile(path)
        self._attempt = attempt
        self._complaints = complaints or Complaints()
        self._written_at = time.monotonic()
        self.last_step = 0
        self.last_loss: float | None = None
        self.before_save: Callable[[], None] = lambda: None
        """Called when a snapshot is taken, to append what is still on its way."""

    def append(self, *, step: int, epoch: int, loss: float) -> None:
        """Note the mean loss of one finished step; written out about once a second."""
        self.last_step, self.last_loss = step, loss
        if self._file is None:
            return
        # repr of a float reads back as the same bits; JSON has no word for NaN
        value = loss if math.isfinite(loss) else None
        self._file.add(json.dumps({"step": step, "epoch": epoch, "loss": value, "attempt": self._attempt}))
        if time.monotonic() - self._written_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Write out what is buffered; `durable` waits until it would outlive a crash of the node."""
        self._written_at = time.monotonic()
        if self._file is None:
            return
        try:
            self._file.write_out(durable=durable)
        except OSError as error:
            self._complaints.about(self._file.path, error)
        else:
            self._complaints.over(self._file.path)

    def rewind(self, step: int) -> None:
        """Drop every line after `step`, and a last line that a crash cut short."""
        self.last_step, self.last_loss = step, None
        if self._file is not None:
            self._file.rewind(lambda line: _step_of(line) <= step)

    def state_dict(self) -> dict[str, Any]:
        self.before_save()
        self.flush(durable=True)
        waiting = [] if self._file is None else list(self._file.waiting)
        return {"step": self.last_step, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rewind(state["step"])
        self._add_missing(state.get("waiting", ()))

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()

    def _add_missing(self, lines: Sequence[str]) -> None:
        """Lines that the volume refused when the snapshot was taken, unless it has taken them since."""
        if self._file is None or not lines:
            return
        there = self._file.path.read_bytes().splitlines() if self._file.path.exists() else []
        last = _step_of(there[-1]) if there else 0
        for line in lines:
            if _step_of(line.encode()) > last:
                self._file.add(line.removesuffix("\n"))
        self.flush()


class RunLog:
    """All logs of a run, on rank 0; on the other ranks the same calls do nothing.

    `wandb` holds the settings to note in a W&B run that is kept offline; None for no such run.
    """

    def __init__(
        self, directory: Path, world: World, attempt: int = 0, *, wandb: Mapping[str, Any] | None = None
    ) -> None:
        self._directory = directory if world.leads else None
        self._attempt = attempt
        self._wandb = wandb
        self._complaints = Complaints()
        self._events = LineFile(directory / "events.jsonl")
        self._curves: list[Curves] | None = None
        self._resumed_at = 0
        self.losses = LossLog(directory / "losses.jsonl" if world.leads else None, attempt, self._complaints)

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        if self._directory is None:
            return
        line = {"time": time.time(), "attempt": self._attempt, "event": kind, **facts}
        self._events.add(json.dumps(line, default=str))
        try:
            self._events.write_out()
        except OSError as error:
            self._complaints.about(self._events.path, error)
        else:
            self._complaints.over(self._events.path)

    def resumed(self, step: int) -> None:
        """Training goes on after `step`; TensorBoard drops what an earlier life drew beyond it."""
        self._resumed_at = step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve. No curve is worth a run: one that cannot be drawn is left out."""
        if self._directory is None:
            return
        if self._curves is None:
            self._curves = list(self._kinds(self._directory))
        for curves in list(self._curves):
            try:
                curves.draw(step, values)
            except OSError as error:
                self._complaints.about(curves.directory, error)
            except Exception as error:
                self._curves.remove(curves)
                name = type(curves).__name__
                print(f"ddp_trainer: {name} is left out from step {step} on: {error}", file=sys.stderr, flush=True)
            else:
                self._complaints.over(curves.directory)

    def say(self, text: str) -> None:
        """A line for people, from one rank."""
        if self._directory is not None:
            print(text, flush=True)

    def close(self) -> None:
        self.losses.close()
        self._events.close()
        for curves in self._curves or ():
            curves.close()
        self._curves = None

    def _kinds(self, directory: Path) -> list[Curves]:
        kinds: list[Curves] = [TensorBoard(directory / "tensorboard", resumed_at=self._resumed_at)]
        if self._wandb is not None:
            kinds.append(OfflineWandb(directory, job=directory.name, attempt=self._attempt, settings=self._wandb))
        return kinds


class SnapshotReporter:
    """Passes on what the snapshots say of themselves: to the heartbeat, for /status and metrics, and to the
    log.
    """

    def __init__(self, heartbeat: Heartbeat, log: RunLog) -> None:
        self._heartbeat = heartbeat
        self._log = log

    def __call__(self, event: SnapshotEvent) -> None:
        saved = event.manifest if event.result in ("saved", "resumed") else None
        facts: dict[str, Any] = {"interval": _interval(event.interval)} if event.interval else {}
        if event.result in ("failed", "skipped"):
            facts["problem"] = {
                "step": event.step,
                "result": event.result,
                "message": event.message,
                "failures": event.failures,
            }
        if event.result == "set_aside":
            facts["set_aside"] = {"step": event.step, "message": event.message}
        self._heartbeat.snapshot(
            step=saved.step if saved else None,
            time=saved.time if saved else None,
            # its checksums are those of the files as they were read back
            verified=saved is not None,
            stall_seconds=event.stall_seconds or None,
            save_seconds=event.save_seconds or None,
            result=event.result if event.result in ("saved", "failed", "skipped") else None,
            **facts,
        )
        told = {"interval": facts["interval"]} if event.interval else {}
        self._log.event(f"snapshot_{event.result}", step=event.step, message=event.message, **told)
        if event.result not in ("saved", "resumed"):
            self._log.say(event.message)


def _interval(chosen: Interval) -> dict[str, Any]:
    """As /status and events.jsonl have it (docs/contracts.md section 4)."""
    return {
        "every": "auto",
        "seconds": chosen.seconds,
        "mttfSeconds": chosen.mttf_seconds,
        "stallSeconds": chosen.stall_seconds,
        "saveSeconds": chosen.save_seconds,
        "failures": chosen.failures,
        "bound": chosen.bound,
    }


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
