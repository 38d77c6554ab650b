"""The training loop: steps, validation, snapshots, and leaving in order when asked to.

Nothing in a step waits for another rank or the device except the gradient reduction itself: losses arrive one
step late (`step_reduce`), logs are buffered, snapshots are written in the background. All state that a later
step depends on is in the snapshot, so a run that is killed anywhere and resumed ends with the same bits as
one that was left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ddp_trainer.contract.exit_codes import Preempted
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.logs.runlog import RunLog, StepLog
from ddp_trainer.rank.step_reduce import StepReduce
from ddp_trainer.rank.stop_request import StopRequest
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.session import Progress, Snapshots
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import Cursor, Loader, StepBatch
from ddp_trainer.train.memory import MicroBatches
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.profiling import Profiler
from ddp_trainer.train.strategies.base import Strategy
from ddp_trainer.train.validate import Evaluation, evaluate


class _Leave(Exception):
    """All ranks agreed to stop while they validated."""


@dataclass(kw_only=True)
class TrainingLoop:
    """One run, built by `train.build`. `run()` trains from wherever the newest snapshot stands to the end."""

    config: TrainConfig
    world: World
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    precision: Precision
    cursor: Cursor
    loader: Loader
    eval_dataset: Dataset[Any] | None
    total_steps: int
    snapshots: Snapshots
    heartbeat: Heartbeat
    log: RunLog
    micro_batches: MicroBatches
    profiler: Profiler

    def __post_init__(self) -> None:
        self._step_reduce = StepReduce(self.world)
        self._interval = self.config.validation_interval
        self._evaluation: Evaluation | None = None
        self._steps_here = 0
        self._stop = StopRequest()
        self.micro_batches.on_lowered = self._micro_batch_lowered
        self._step_log = StepLog(self.log, self.total_steps)
        # A snapshot must hold the loss of its own last step, which is still on its way when it is taken.
        self.log.losses.before_save = self._record_loss

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.cursor.steps

    @property
    def progress(self) -> Progress:
        return Progress(step=self.step, epoch=self.cursor.epoch, samples=self.cursor.samples)

    def run(self) -> Evaluation | None:
        """Train to the end; the last validation. Raises Preempted once all ranks agreed to stop and the
        snapshot is saved.
        """
        self._resume()
        self._stop.listen()
        self.strategy.model.train()
        try:
            if self.step:
                # The validation that belongs to this step may not have come to its end.
                self._validate_if_due(epoch_end=self.cursor.offset == 0)
            self.heartbeat.enter("first_step")
            while self.step < self.total_steps:
                self._train_epoch()
            return self._finish()
        except _Leave:
            self._leave()
        except Exception as error:
            self.heartbeat.enter("save")
            self.snapshots.emergency(error)
            raise
        finally:
            self.log.close()

    def _resume(self) -> None:
        self.snapshots.resume()
        step = self.step
        if self.micro_batches.limit is not None:
            self._micro_batch_lowered(self.micro_batches.limit)
        self.log.resumed(step)
        self.heartbeat.resumed(step, self.cursor.samples)
        self.log.event(
            "resumed" if step else "started",
            step=step,
            totalSteps=self.total_steps,
            samples=self.cursor.samples,
            worldSize=self.world.size,
            config=dataclasses.asdict(self.config),
        )
        self.log.print_line(
            f"{self.config.task} with {self.config.strategy} on {self.world.size} {self.world.device.type} "
            "rank(s): "
            + (
                f"resuming after step {step} of {self.total_steps}"
                if step
                else f"{self.total_steps} steps from the start"
            )
        )

    def _train_epoch(self) -> None:
        for loaded in self.loader.epoch(self.cursor.epoch, self.cursor.offset):
            batch = self.micro_batches.cut(loaded)
            if self._steps_here == 0:
                batch = self.micro_batches.fit(batch, self._probe_memory, step=self.step + 1)
                with self._memory_noted(batch):
                    self.strategy.warm_up(batch)
            self._train_step(batch)
            if self.step >= self.total_steps:
                return

    def _probe_memory(self, batch: StepBatch) -> bool:
        return self.strategy.probe_memory(batch, self.optimizer)

    def _memory_noted(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Around what the next step does with the device."""
        return self.micro_batches.noted(f"step {self.step + 1}", self.micro_batches.size(batch))

    def _micro_batch_lowered(self, size: int) -> None:
        self.heartbeat.out_of_memory(size)
        self.log.event("micro_batch_lowered", step=self.step, microBatch=size)
        self.log.print_line(
            f"a rank ran out of memory: all take micro-batches of at most {size} samples from here on; the "
            f"global batch stays {self.config.global_batch}"
        )

    def _train_step(self, batch: StepBatch) -> None:
        """One optimizer step and what follows from it, in the order that makes a resumed run repeat it."""
        epoch = self.cursor.epoch
        self.profiler.before_step(self.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        with self._memory_noted(batch):
            loss_part = self.strategy.forward_backward(batch)
            # From here on the states are no longer those of the last step's end.
            self.snapshots.begin_update()
            self.precision.step(self.optimizer, self._clip)
        self.scheduler.step()
        epoch_end = self.cursor.advance(batch.total)
        if traces := self.profiler.after_step(self.step):
            self.log.print_line(f"profiled up to step {self.step}: {traces}")

        stop = self._agreed_to_stop()
        self._step_reduce.start(loss_part, step=self.step, epoch=epoch, stop=self._stop.raised)
        self._report(batch.total)
        if self.step >= self.total_steps:
            return  # the end has a snapshot and a validation of its own
        if stop:
            raise _Leave
        self.snapshots.step_end(self.progress, epoch_end=epoch_end)
        self._validate_if_due(epoch_end=epoch_end)

    @property
    def _clip(self) -> Callable[[], Any] | None:
        norm = self.config.clip_norm
        return None if norm is None else lambda: self.strategy.clip(norm)

    def _agreed_to_stop(self) -> bool:
        """Whether a rank was asked to stop before the step before ended."""
        self._record_loss()
        result = self._step_reduce.result()
        return result is not None and result.stop

    def _record_loss(self) -> None:
        """Log the newest reduced loss, unless it is logged already."""
        result = self._step_reduce.result()
        if result is None or result.step <= self.log.losses.last_step:
            return
        self.log.losses.append(step=result.step, epoch=result.epoch, loss=result.loss)
        if result.step % self.config.log_every == 0:
            skipped = self.precision.skipped_steps if self.precision.name == "fp16" else None
            self._step_log.plot(result, learning_rate=self._learning_rate, skipped_steps=skipped)
            self._step_log.print_line(result)

    def _report(self, samples: int) -> None:
        """Tell the heartbeat. Its loss is that of the step before, which costs no wait."""
        self._steps_here += 1
        if self._steps_here == 1:
            self.heartbeat.enter("train")
            # Time to the first step is what a user waits for, and what a restart costs.
            self.log.event("first_step", step=self.step)
        self._step_log.trained(samples)
        self.heartbeat.step(
            step=self.step,
            epoch=self.cursor.epoch,
            total_steps=self.total_steps,
            samples=self.cursor.samples,
            loss=self.log.losses.last_loss,
            samples_per_second=self._step_log.samples_per_second,
            learning_rate=self._learning_rate,
        )

    @property
    def _learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def _validate_if_due(self, *, epoch_end: bool) -> None:
        if self._interval.due(step=self.step, finished_epochs=self.cursor.epoch, epoch_end=epoch_end):
            self._validate(may_leave=True)
            self.heartbeat.enter("train")

    def _validate(self, *, may_leave: bool) -> None:
        """Evaluate the model. With `may_leave`, all ranks leave between two batches once one was asked to
        (raises _Leave).
        """
        if self.eval_dataset is None:
            return
        self.heartbeat.enter("validate")
        step_reduce = StepReduce(self.world)
        nothing = torch.zeros((), device=self.world.device)

        def after_batch() -> None:
            self.heartbeat.beat()
            result = step_reduce.result()
            if may_leave and result is not None and result.stop:
                raise _Leave
            step_reduce.start(nothing, step=self.step, epoch=self.cursor.epoch, stop=self._stop.raised)

        batch = self.config.eval_batch or self.config.micro_batch or self.config.global_batch // self.world.size
        batch = min(batch, self.micro_batches.limit or batch)
        with self.micro_batches.noted(f"the validation after step {self.step}", batch):
            self._evaluation = evaluate(self.strategy, self.eval_dataset, self.world, batch=batch, on_batch=after_batch)
        step_reduce.result()
        metrics = self._evaluation.metrics
        self.heartbeat.metrics(**metrics)
        self.log.event("validated", step=self.step, epoch=self.cursor.epoch, **metrics)
        self.log.scalars(self.step, {f"validation/{name}": value for name, value in metrics.items()})
        self._step_log.paused()

    def _leave(self) -> NoReturn:
        """Save where all ranks stand, and go."""
        self._save("preempted")
        self.log.event("preempted", step=self.step)
        self.log.print_line(f"asked to stop: snapshot of step {self.step} of {self.total_steps} is saved")
        raise Preempted(f"asked to stop; the snapshot of step {self.step} is saved")

    def _finish(self) -> Evaluation | None:
        self._save("final")
        if self._interval.count:
            self._validate(may_leave=False)
        metrics = self._evaluation.metrics if self._evaluation else {}
        self.log.event("finished", step=self.step, samples=self.cursor.samples, **metrics)
        self.log.print_line(f"finished after {self.step} steps" + (f": {self._evaluation}" if self._evaluation else ""))
        self.heartbeat.enter("done")
        return self._evaluation

    def _save(self, kind: Literal["preempted", "final"]) -> None:
        """Save and wait. Raises RuntimeError if the volume would not take it: then this was no orderly end."""
        self._record_loss()
        self.heartbeat.enter("save")
        saved = self.snapshots.save(self.progress, kind=kind, wait=True)
        self.snapshots.close()
        if not saved:
            raise RuntimeError(
                f"the {kind} snapshot of step {self.step} could not be saved; the events before say why. The "
                "run goes on from the newest one that was, when it is started again"
            )
