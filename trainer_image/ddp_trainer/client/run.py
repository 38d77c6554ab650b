"""What `attach` gives to a training program: the calls, in their order, on every rank alike.

step = run.resume()                     once, before the loop: the states of the newest snapshot are loaded
optimizer.step(); scheduler.step()      a step …
run.step_end(loss)                      … ends, and may be saved
run.should_stop()                       after it: whether to leave the loop
run.finish()                            once, after the loop

run.phase("validate"), run.beat()       around and in what takes long and is no step
run.log(accuracy=0.9)                   values of the program's own, at any time
run.checkpoint(step), run.latest()      files of the program's own, at any time
"""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_trainer.client.order import CallOrder
from ddp_trainer.client.states import LOSSES, States
from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import Preempted, UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.logs.runlog import RunLog, SnapshotReporter, StepLog
from ddp_trainer.rank.failures import on_failure
from ddp_trainer.rank.observe import ScriptObserver
from ddp_trainer.rank.step_reduce import StepReduce
from ddp_trainer.rank.stop_request import StopRequest, leave_as_preempted
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.checkpoints import Checkpoints
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.schedule import SaveInterval, SaveSchedule
from ddp_trainer.snapshots.session import Progress, Snapshots
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.trust.names import job_directory
from ddp_trainer.snapshots.values import Identity, SnapshotEvent

PHASES: Final = ("load", "validate", "save")
"""What a program may say that it does between steps; each has the longest allowance of the stall detection."""

MOST_VALUES: Final = 64
"""Names of values that a run may log: each is a series of Prometheus."""

PLOT_STEPS: Final = 10
"""Steps from one point in TensorBoard to the next."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")


class Run:
    """A training run: `step`, `samples` and `epoch` finished, over all attempts. Made by `attach`."""

    def __init__(
        self,
        states: States,
        world: World,
        job: JobEnvironment,
        heartbeat: Heartbeat,
        observer: ScriptObserver | None,
        *,
        global_batch: int,
        total_steps: int | None,
    ) -> None:
        """`observer` is what reports steps; None where the run does so itself. Without states, the program saves."""
        self.step = 0
        self.samples = 0
        self.epoch = 0
        self._global_batch = global_batch
        self._total_steps = total_steps
        self._world = world
        self._heartbeat = heartbeat
        self._observer = observer
        self._log = RunLog(job, world)
        self._log.losses.before_save = self._record_loss
        _close_at_exit(self._log)
        self._step_log = StepLog(self._log, total_steps)
        self._step_reduce = StepReduce(world)
        self._has_loss = False
        self._stop = StopRequest()
        self._stopping = False
        self._should_save = False
        self._is_resumed = False
        self._logged: set[str] = set()
        self._has_refused = False
        self._order = CallOrder(states.live)
        self._optimizer = next((value for value in states.live.values() if isinstance(value, Optimizer)), None)
        report = SnapshotReporter(heartbeat, self._log)
        self._snapshots: Snapshots | None = None
        self._schedule: SaveSchedule | None = None
        if states.saved:
            self._snapshots = Snapshots.of_job(
                {**states.saved, LOSSES: self._log.losses},
                job,
                world,
                strategy="own",
                global_batch=global_batch,
                on_event=report,
                sharded=states.sharded,
                per_rank=states.per_rank,
                changes_with_optimizer=(LOSSES, *states.changes_with_optimizer),
            )
        directory = job_directory(job.shared, job.name)
        if not states.saved:
            ranks = Ranks(world.rank, world.size)
            self._schedule = SaveSchedule(SaveInterval.parse(job.snapshot_every), ranks, directory, nodes=job.nodes)

        def checkpointed(event: SnapshotEvent) -> None:
            chosen = self._schedule.saved(event) if self._schedule and event.result == "saved" else event
            report(replace(chosen, stall_seconds=0.0))  # the phase `save` has that time already

        self._checkpoints = Checkpoints(
            directory,
            keep=job.snapshot_keep,
            identity=Identity(job.name, job.uid, job.created, job.attempt, world.rank, world.size, job.nodes),
            global_batch=global_batch,
            on_event=checkpointed,
        )
        self._found: tuple[tuple[Manifest, Path] | None] | None = None
        """What `latest` or `resume` has verified for the other of the two."""

    # The loop

    def resume(self) -> int:
        """How many steps are finished. Call it once, before the loop.

        With states, the newest snapshot is loaded into them. Without, it is the step of the newest checkpoint that
        verifies, which the program loads from `latest()`.
        """
        if self._is_resumed:
            raise UserError("run.resume() was called twice: call it once, before the loop")
        if self._observer is None:
            self._heartbeat.enter("load")
        if self._snapshots is not None:
            manifest = self._snapshots.resume()
        else:
            # What `latest` has given: another search may find another one, whose weights the program does not have.
            self._found = self._found or (self._checkpoints.newest(),)
            (newest,) = self._found
            manifest = newest[0] if newest is not None else None
            if manifest is not None:
                self._checkpoints.resumed(manifest)
        if manifest is not None:
            self.step, self.epoch, self.samples = manifest.step, manifest.epoch, manifest.samples
        if self._schedule is not None:
            self._schedule.start(self.step)
        self._is_resumed = True
        self._order.begins()
        self._log.resumed(self.step)
        self._log.event("resumed" if self.step else "started", step=self.step, worldSize=self._world.size)
        self.listen()
        if self._snapshots is not None:
            on_failure(self._emergency)
        if self._observer is not None:
            self._observer.begins(step=self.step, total_steps=self._total_steps)
        else:
            self._heartbeat.resumed(self.step, self.samples)
            self._heartbeat.enter("first_step")
        return self.step

    def step_end(self, loss: Tensor | float | None = None, *, epoch_end: bool = False) -> None:
        """Say that an optimizer step is done, with this rank's mean loss if it is known; saves if it is time.

        Call it after `optimizer.step()`, and after whatever else the step changes, such as `scheduler.step()`. Once all
        ranks agreed to stop, it has saved a snapshot, and `should_stop` says so. A loop that goes on nevertheless gets
        Preempted at the next call.
        """
        self._check_resumed("step_end")
        if self._stopping:
            raise Preempted(f"asked to stop; the run ends after step {self.step}")
        self._order.step_ended()
        stop = self._agreed_to_stop()
        self.step += 1
        self.samples += self._global_batch
        self._begin_reduce(loss)
        self.epoch += epoch_end
        self._report()
        if self._snapshots is not None:
            if stop:
                self._save_and_stop()
            else:
                self._snapshots.step_end(self._progress, epoch_end=epoch_end)
        elif self._schedule is not None:
            self._should_save = stop or self._schedule.after(self._progress, epoch_end=epoch_end)
            if stop:
                self._stop_here()

    def should_stop(self) -> bool:
        """Whether to leave the loop, the same on every rank; the exit code will say preempted. The snapshot is saved;
        a program that saves itself does so now.
        """
        return self._stopping

    def should_save(self) -> bool:
        """For a program that saves itself: whether the job's save interval, or a stop, asks for a checkpoint after this
        step, until there is one; the same on every rank.
        """
        return self._should_save

    def finish(self, **metrics: float) -> None:
        """After the loop: save a last snapshot, unless it was left early, and report measured values, such as
        eval_accuracy=0.96.
        """
        self._check_resumed("finish")
        if self._stopping:
            self._log.close()  # a program that saves itself has done so only now
            return
        self._order.check()
        if self._snapshots is not None:
            self._save("final")
        self.log(metrics)
        self._log.event("finished", step=self.step, **metrics)
        self._log.close()
        self._heartbeat.enter("done")

    def listen(self) -> None:
        """From now on SIGTERM asks all ranks to stop after a step, also where a library has put a handler of its own in
        place since `resume`.
        """
        self._stop.listen()

    # What is no step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a validation, a download or a save of the program's own: no step is due in it, and its time is shown.
        `name` is one of PHASES. In one that takes longer than half an hour, call `beat` now and then.
        """
        if name not in PHASES:
            raise UserError(f"run.phase({name!r}): the phases are {', '.join(PHASES)}")
        before = self._heartbeat.phase
        self._heartbeat.enter(name)
        self._step_log.paused()
        try:
            yield
        finally:
            self._heartbeat.enter(before)

    def beat(self) -> None:
        """Say that this rank is alive, for instance once a validation batch."""
        self._heartbeat.beat()

    def log(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Report values of the program's own: `run.log(accuracy=0.9)`, or in a dict, `run.log({"val/loss": 2.0})`.

        The last value of each is in the job's status and in Prometheus (`ddpjob_train_metric`), and all are in
        TensorBoard; rank 0's count. Names have up to 64 letters, digits and any of `_./-`; a run has up to 64.
        """
        numbers = {name: float(value) for name, value in {**(values or {}), **named}.items()}
        for name in numbers:
            if not _NAME.fullmatch(name):
                raise UserError(
                    f"run.log: {name!r} is no name of a value; use a letter, then up to 63 letters, digits and _ . / -"
                )
        refused = sorted(numbers.keys() - self._logged)[max(0, MOST_VALUES - len(self._logged)) :]
        if refused and not self._has_refused:
            self._has_refused = True
            print(f"ddp_trainer: {refused[0]!r} is not reported: a run logs {MOST_VALUES} values", file=sys.stderr)
        numbers = {name: value for name, value in numbers.items() if name not in refused}
        self._logged |= numbers.keys()
        if numbers:
            self._heartbeat.metrics(**numbers)
            self._log.scalars(self.step, {name: value for name, value in numbers.items() if math.isfinite(value)})

    # Files of the program's own

    @contextmanager
    def checkpoint(self, step: int | None = None) -> Iterator[Path]:
        """A folder that the ranks write a checkpoint into, each what it has; `step` is the last one unless it is given.

        After the block the files are summed and synced, and the folder gets its name, at once and last. The newest
        `spec.snapshots.keep` stay. An exception in the block of any rank leaves no checkpoint: it reaches its own rank
        as it is, the others as SnapshotError. Raises FencedError if a newer attempt has taken over, and UserError for
        a step that has a checkpoint of this attempt.
        """
        at = self.step if step is None else int(step)
        if at < 0:
            raise UserError(f"run.checkpoint({step}): a step is a whole number of at least 0")
        kind: Literal["preempted", "periodic"] = "preempted" if self._stopping else "periodic"
        progress = Progress(at, self.epoch, self.samples)
        with self.phase("save"), self._checkpoints.writing(progress, kind=kind) as folder:
            yield folder
        self._found = None
        if at == self.step:
            self._should_save = False

    def latest(self) -> Path | None:
        """The newest checkpoint whose every byte verifies, the same folder on every rank; None if there is none."""
        (newest,) = self._found or (self._checkpoints.newest(),)
        self._found = None if self._is_resumed else (newest,)
        return None if newest is None else newest[1]

    # A step, part by part

    @property
    def _progress(self) -> Progress:
        return Progress(step=self.step, epoch=self.epoch, samples=self.samples)

    def _check_resumed(self, call: str) -> None:
        if not self._is_resumed:
            raise UserError(f"run.{call}() was called before run.resume(): call resume() once, before the loop")

    def _agreed_to_stop(self) -> bool:
        self._record_loss()
        result = self._step_reduce.result()
        return result is not None and result.stop

    def _begin_reduce(self, loss: Tensor | float | None) -> None:
        self._has_loss = loss is not None
        part = loss.detach() if isinstance(loss, Tensor) else torch.tensor(0.0 if loss is None else loss)
        self._step_reduce.start(part / self._world.size, step=self.step, epoch=self.epoch, stop=self._stop.raised)

    def _record_loss(self) -> None:
        result = self._step_reduce.result()
        if result is None or not self._has_loss or result.step <= self._log.losses.last_step:
            return
        self._log.losses.append(step=result.step, epoch=result.epoch, loss=result.loss)
        if result.step % PLOT_STEPS == 0:
            self._step_log.plot(result, learning_rate=self._learning_rate)

    def _report(self) -> None:
        """Tell the heartbeat, unless the observer does. The loss is that of the step before, which costs no wait."""
        if self._global_batch:
            self._step_log.trained(self._global_batch)
        if self._observer is not None:
            return
        self._heartbeat.enter("train")
        self._heartbeat.step(
            step=self.step,
            epoch=self.epoch,
            total_steps=self._total_steps,
            samples=self.samples if self._global_batch else None,
            loss=self._log.losses.last_loss,
            samples_per_second=self._step_log.samples_per_second,
            learning_rate=self._learning_rate,
        )

    @property
    def _learning_rate(self) -> float | None:
        """Of the first parameter group; None where a tensor has it, which may lie on a GPU."""
        rate = self._optimizer.param_groups[0].get("lr") if self._optimizer is not None else None
        return float(rate) if isinstance(rate, int | float) else None

    def _emergency(self, error: Exception) -> None:
        """Save the last finished step, if the states are still those of it."""
        assert self._snapshots is not None
        self._heartbeat.enter("save")
        self._snapshots.emergency(error)
        self._log.close()

    def _save_and_stop(self) -> None:
        self._save("preempted")
        self._stop_here()
        self._log.close()

    def _stop_here(self) -> None:
        self._log.event("preempted", step=self.step)
        self._stopping = True
        leave_as_preempted(self.step)

    def _save(self, kind: Literal["preempted", "final"]) -> None:
        assert self._snapshots is not None
        self._record_loss()
        self._heartbeat.enter("save")
        saved = self._snapshots.save(self._progress, kind=kind, wait=True)
        self._snapshots.close()
        if not saved:
            raise RuntimeError(f"the {kind} snapshot of step {self.step} could not be saved; see the events before it")


def _close_at_exit(log: RunLog) -> None:
    """A library that trains does not say when it is done, so nothing may call `finish`."""
    pid = os.getpid()
    atexit.register(lambda: log.close() if os.getpid() == pid else None)
