"""The training loop: data, forward and backward passes, validation, memory.

What every loop needs comes from the run (`client.run`), as in a loop with `attach`: resuming, the vote on a stop, the
record of losses, snapshots, phases, the heartbeat. Nothing in a step waits for another rank or the device except the
gradient reduction itself. All state that a later step depends on is in the snapshot, so a run that is killed anywhere
and resumed ends with the same bits as one that was left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ddp_trainer.client.recovery import Recovery
from ddp_trainer.client.run import Run
from ddp_trainer.contract.exit_codes import Preempted
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.outcomes import is_peer_lost
from ddp_trainer.live.deciding import Excluded, Finished
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank.world import World
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import Cursor, DataSetLost, Loader, StepBatch, is_of_samples
from ddp_trainer.train.memory import MicroBatches
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.profiling import Profiler
from ddp_trainer.train.strategies.base import Strategy
from ddp_trainer.train.validate import Evaluation, evaluate


class _Regroup(Exception):
    """A new rank waits to join, or one leaves: the others form another process group after this step."""


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
    attached: Run
    """The loop is attached to it as a user's own would be."""
    heartbeat: Heartbeat
    log: RunLog
    micro_batches: MicroBatches
    profiler: Profiler
    recovery: Recovery | None = None
    """With live recovery: the ranks join each other here, and go on when one is lost."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around collectives of all ranks, where those of a pod hold the model together: these have no collective between
    them, and all raise where one does.
    """

    def __post_init__(self) -> None:
        self._interval = self.config.validation_interval
        self._evaluation: Evaluation | None = None
        if self.precision.name == "fp16":
            self.heartbeat.skipped_steps("overflow", 0)
        # warming up is a collective that a rank which joins later would be alone in
        self._is_first_step = self.recovery is None
        self.micro_batches.on_lowered = self._micro_batch_lowered

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.cursor.steps

    def run(self) -> Evaluation | None:
        """Train to the end; the last validation. Raises Preempted once all ranks agreed to stop and the
        snapshot is saved.
        """
        try:
            if self.recovery is None:
                self._resume()
            elif not self.recovery.join():
                self._resume()
                self.recovery.resumed()
            while not self._is_at_end():
                assert self.recovery is not None
                self.recovery.go_on()
            return self._evaluation
        except (Finished, Excluded):
            raise  # the volume is that of the others
        except Exception as error:
            if self.recovery is not None:
                self.recovery.failed(error)  # the others go on, and it waits for the volume alone
            self.attached.emergency(error)
            raise
        finally:
            self.log.close()

    def _is_at_end(self) -> bool:
        """Train to the end. False where the ranks have to leave their process group before."""
        try:
            self.strategy.model.train()
            if self.step:
                # The validation that belongs to this step may not have come to its end.
                self._validate_if_due(epoch_end=self.cursor.offset == 0)
            while self.step < self.total_steps:
                self._train_epoch()
            self._finish()
        except _Regroup:
            return False
        except RuntimeError as error:
            if self.recovery is None or not is_peer_lost(error):
                raise
            if is_of_samples(error):  # all ranks would take the step again and again
                raise DataSetLost(error).with_traceback(error.__traceback__) from None
            self.recovery.lost(error)
            return False
        return True

    def _resume(self) -> None:
        step = self.attached.resume()
        if self.micro_batches.limit is not None:
            self._micro_batch_lowered(self.micro_batches.limit)
        self.log.print_line(
            f"{self.config.task} with {self.config.strategy} on {self.world.size} {self.world.device.type} rank(s): "
            f"{max(0, self.total_steps - step)} steps to train"
        )

    def _train_epoch(self) -> None:
        for loaded in self._loaded():
            if self.step + 1 in self.attached.skipped_steps:
                epoch_end = self.cursor.advance(loaded.total)
                with self.together():
                    self.attached.skip_step(samples=loaded.total, epoch_end=epoch_end)
                self._after_step(epoch_end=epoch_end)
            else:
                self._train_step(self._fitted(loaded))
            if self.step >= self.total_steps:
                return

    def _loaded(self) -> Iterator[StepBatch]:
        """The rest of the epoch, step by step; the time that each takes to come is noted."""
        batches = self.loader.epoch(self.cursor.epoch, self.cursor.offset)
        while True:
            if self.recovery is not None:
                self.recovery.begin_step(self.attached.generators_at_boundary())
            began = time.perf_counter()
            loaded = next(batches, None)
            if loaded is None:
                return
            self.heartbeat.waited_for_data(time.perf_counter() - began)
            yield loaded

    def _fitted(self, loaded: StepBatch) -> StepBatch:
        """A batch in micro-batches that have room, which the first step finds out."""
        batch = self.micro_batches.cut(loaded)
        if self._is_first_step:
            batch = self.micro_batches.fit(batch, self._probe_memory, step=self.step + 1)
            with self._memory_noted(batch):
                self.strategy.warm_up(batch)
        return batch

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
        self.profiler.before_step(self.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        with self._memory_noted(batch):
            loss_part = self.strategy.forward_backward(batch)
            norm, skipped = self.precision.step(self.optimizer, self._clip)
        if skipped:  # the schedule would run ahead of the updates
            self.heartbeat.skipped_steps("overflow")
        else:
            self.scheduler.step()
        epoch_end = self.cursor.advance(batch.total)
        self._is_first_step = False
        if traces := self.profiler.after_step(self.step):
            self.log.print_line(f"profiled up to step {self.step}: {traces}")
        with self.together():
            self.attached.step_end(loss_part, weight=1.0, samples=batch.total, epoch_end=epoch_end, gradient_norm=norm)
        if self.recovery is not None:
            self.recovery.end_step()
        self._after_step(epoch_end=epoch_end)

    def _after_step(self, *, epoch_end: bool) -> None:
        self._leave_if_stopped()
        if self.step < self.total_steps:  # at the end all are done
            self._regroup_if_agreed()
        if self.step < self.total_steps:  # the end has a validation of its own
            self._validate_if_due(epoch_end=epoch_end)

    @property
    def _clip(self) -> Callable[[], Tensor] | None:
        norm = self.config.clip_norm
        return None if norm is None else lambda: self.strategy.clip(norm)

    def _validate_if_due(self, *, epoch_end: bool) -> None:
        if self._interval.due(step=self.step, finished_epochs=self.cursor.epoch, epoch_end=epoch_end):
            self._validate(may_leave=True)

    def _validate(self, *, may_leave: bool) -> None:
        """Evaluate the model. With `may_leave`, all ranks leave between two batches once one was asked to
        (raises Preempted).
        """
        if self.eval_dataset is None:
            return

        def after_batch() -> None:
            self.attached.beat()
            if not may_leave:
                return
            with self.together():
                if self.attached.agreed_to_stop():
                    self.attached.stop()
            self._leave_if_stopped()
            self._regroup_if_agreed()

        batch = self.config.eval_batch or self.config.micro_batch or self.config.global_batch // self.world.size
        batch = min(batch, self.micro_batches.limit or batch)
        noted = self.micro_batches.noted(f"the validation after step {self.step}", batch)
        with self.attached.phase("validate"), noted:
            self._evaluation = evaluate(
                self.strategy,
                self.eval_dataset,
                self.world,
                batch=batch,
                on_batch=after_batch,
                together=self.together,
            )
        metrics = self._evaluation.metrics
        self.attached.check_loss(self._evaluation.loss)
        self.attached.log(metrics)
        self.log.event("validated", step=self.step, epoch=self.cursor.epoch, **metrics)

    def _regroup_if_agreed(self) -> None:
        """With live recovery: leave the process group, where a rank joins or leaves. Raises Left on one that leaves."""
        if self.recovery is not None and self.recovery.leaves_group():
            raise _Regroup

    def _leave_if_stopped(self) -> None:
        if self.attached.should_stop():
            raise Preempted(f"asked to stop; the snapshot of step {self.step} is saved")

    def _finish(self) -> None:
        with self.together():
            self.attached.save_last()
        if self._interval.count:
            self._validate(may_leave=False)
        self.attached.finish(**(self._evaluation.metrics if self._evaluation else {}))
        self.log.print_line(f"finished after {self.step} steps" + (f": {self._evaluation}" if self._evaluation else ""))
