"""What a run leaves to read in logs/<job> on the volume, written by rank 0 alone.

    losses/         one file an attempt, one line a step, the loss exact to the last bit (`losses`)
    events.jsonl    started, resumed, validated, snapshots, preempted, finished; of every attempt
    tensorboard/    loss, learning rate, throughput and validation, for `tensorboard --logdir`
    wandb/          the same for W&B, with `--wandb offline`

A volume that refuses or hangs neither ends training nor holds it up: lines
wait in memory, and an error is reported once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.standard_error import say
from ddp_trainer.logs.log_files import LogFile, LogThread, WriteErrors
from ddp_trainer.logs.losses import EVENTS, FOLDER, LossLog
from ddp_trainer.logs.writers import MetricWriter, OfflineWandb, TensorBoard
from ddp_trainer.rank.step_reduce import StepResult
from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.trust.fence import Attempt
from ddp_trainer.snapshots.values import ChosenInterval, SnapshotEvent

CLOSE_SECONDS = 10.0
"""How long the end of a run waits for its last lines."""


class RunLog:
    """All logs of a run, on rank 0; on the other ranks the same calls do nothing.

    `wandb` holds the settings to note in a W&B run that is kept offline; None for no such run.
    """

    def __init__(self, job: JobEnvironment, world: World, *, wandb: Mapping[str, Any] | None = None) -> None:
        directory = job.log_dir
        self._world = world
        self._given_directory = directory
        self._directory = directory if world.leads else None
        self._attempt = job.attempt
        self._wandb = wandb
        self._write_errors = WriteErrors()
        self._thread = LogThread()
        # they are few, and no snapshot has them
        self._events = LogFile(directory / EVENTS, self._thread, self._write_errors, is_durable=True)
        self._writers: list[MetricWriter] | None = None
        self._resumed_at: int | None = None
        self._losses_path = directory / FOLDER / f"{Attempt(job.created, job.attempt, job.uid).name}.jsonl"
        self.losses = LossLog(
            self._losses_path if world.leads else None,
            job.attempt,
            self._write_errors,
            self._thread,
            may_lead=job.live is not None,
        )

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        if self._directory is None:
            return
        line = {"time": time.time(), "attempt": self._attempt, "event": kind, **facts}
        self._events.lines.add(json.dumps(line, default=str))
        self._events.write_soon()

    def regrouped(self) -> None:
        """The world has changed: its rank 0 writes from here on."""
        if self._world.leads and self._directory is None:
            self.losses.lead(LogFile(self._losses_path, self._thread, self._write_errors))
        elif not self._world.leads and self._directory is not None:
            self.losses.lead(None)
            # TensorBoard reads files in the order in which they began: what this rank has to write when it leads again
            # would come before the points of the rank that leads meanwhile, which begin by dropping all later ones
            self._thread.do(self._close_writers)
        self._directory = self._given_directory if self._world.leads else None

    def resumed(self, step: int) -> None:
        """Training goes on after `step`: losses and TensorBoard drop what earlier attempts logged after it."""
        self.losses.resumed(step)
        self._resumed_at = step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a value of each metric. No metric is worth a run: a writer that fails is left out."""
        if self._directory is not None:
            self._thread.do(functools.partial(self._write_metrics, self._directory, step, dict(values)))

    def print_line(self, text: str) -> None:
        """A line for people, from one rank."""
        if self._directory is not None:
            with contextlib.suppress(Exception):  # the script may have closed it, or put something else in its place
                print(text, flush=True)

    def close(self) -> None:
        """Write what waits and let go of the files, and of the run whose losses they were. Raises nothing, and gives a
        volume that hangs ten seconds."""
        self.losses.before_save = lambda: None
        if self._directory is None:
            return
        with storage_awaited():
            is_closed = self._thread.close(self._let_go, timeout=CLOSE_SECONDS)
        if not is_closed:
            self._write_errors.hung(self._directory, CLOSE_SECONDS)

    def _let_go(self) -> None:
        """In the log thread."""
        self.losses.close()
        self._events.close()
        self._close_writers()

    def _close_writers(self) -> None:
        """In the log thread. What is written next has writers of its own."""
        for writer in self._writers or ():
            writer.close()
        self._writers = None

    def _write_metrics(self, directory: Path, step: int, values: Mapping[str, float]) -> None:
        """In the log thread."""
        if self._writers is None:
            self._writers = list(self._kinds(directory))
        for writer in list(self._writers):
            try:
                writer.write(step, values)
            except OSError as error:
                self._write_errors.report(writer.directory, error)
            except Exception as error:
                self._writers.remove(writer)
                name = type(writer).__name__
                say(f"ddp_trainer: {name} is left out from step {step} on: {error}")
            else:
                self._write_errors.clear(writer.directory)

    def _kinds(self, directory: Path) -> list[MetricWriter]:
        kinds: list[MetricWriter] = [TensorBoard(directory / "tensorboard", resumed_at=self._resumed_at)]
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
            # its checksums are those of what was written and synced, or of the files as they were read
            verified=saved is not None,
            size=saved.total_bytes if saved else None,
            stall_seconds=event.stall_seconds or None,
            save_seconds=event.save_seconds or None,
            result=event.result if event.result in ("saved", "failed", "skipped") else None,
            **facts,
        )
        said = {"interval": facts["interval"]} if event.interval else {}
        self._log.event(f"snapshot_{event.result}", step=event.step, message=event.message, **said)
        if event.result not in ("saved", "resumed"):
            self._log.print_line(event.message)


def _interval(chosen: ChosenInterval) -> dict[str, Any]:
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


THROUGHPUT_WINDOW: Final = 50
LINE_SECONDS: Final = 1.0


class StepLog:
    """Measures throughput, and writes the metrics of steps to `log`. `total_steps` is None where nobody says."""

    def __init__(self, log: RunLog, total_steps: int | None) -> None:
        self._log = log
        self._total_steps = total_steps
        self._recent: deque[tuple[float, int]] = deque(maxlen=THROUGHPUT_WINDOW)
        """Seconds and samples of the last steps."""
        self._ended_at: float | None = None
        self._printed_at = -math.inf

    @property
    def samples_per_second(self) -> float | None:
        """Over the last steps, of all ranks together; None after one step, which measures nothing."""
        seconds = sum(seconds for seconds, _ in self._recent)
        return sum(samples for _, samples in self._recent) / seconds if seconds else None

    def trained(self, samples: int) -> None:
        """A step on so many samples, of all ranks together, has just ended."""
        now = time.monotonic()
        if self._ended_at is not None:
            self._recent.append((now - self._ended_at, samples))
        self._ended_at = now

    def paused(self) -> None:
        """The time since the last step is no step's."""
        self._ended_at = None

    def regrouped(self) -> None:
        """Other ranks train from here on: what was measured is not theirs."""
        self._recent.clear()
        self.paused()

    def plot(self, result: StepResult, *, learning_rate: float | None, plotted: Mapping[str, float]) -> None:
        """Write the metrics of a step, and those of `plotted`."""
        rate = self.samples_per_second
        values = {"train/loss": result.loss, **plotted}
        if learning_rate is not None:
            values["train/learning_rate"] = learning_rate
        if rate is not None:
            values["train/samples_per_second"] = rate
        self._log.scalars(result.step, values)

    def print_line(self, result: StepResult) -> None:
        """At most once a second a line for people."""
        rate = self.samples_per_second
        if time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._printed_at = time.monotonic()
            speed = "" if rate is None else f", {rate:.0f} samples/s"
            self._log.print_line(
                f"step {result.step} of {self._total_steps}, epoch {result.epoch}, loss {result.loss:.4f}{speed}"
            )
