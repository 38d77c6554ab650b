"""The end of each step, for the built-in loop and for loops with `attach` alike: its mean loss, whether all ranks stop,
and what is shown of it.

What ranks have to agree on goes through one small reduction, which is read a step later (`rank.step_reduce`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum, auto
from typing import Final

import torch
from torch import Tensor

from ddp_trainer.client.finite import FiniteLosses
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.logs.runlog import RunLog, StepLog
from ddp_trainer.rank.data_waits import DataWaits
from ddp_trainer.rank.pass_times import PassTimes
from ddp_trainer.rank.step_reduce import StepReduce, StepResult
from ddp_trainer.rank.stop_request import StopRequest
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.values import Progress

EPOCH_LOSS: Final = "epoch_loss"
"""The mean training loss of the steps of an epoch."""

PLOT_STEPS: Final = 10
"""Steps from one point in TensorBoard to the next."""


class Change(Enum):
    """What becomes of the process group after a step, with live recovery. All ranks leave it, and form another."""

    NONE = auto()
    JOINED = auto()
    """A new rank waits to be one of them."""
    LEFT = auto()
    """Other ranks were asked to stop, and end; enough are left to go on."""
    LEAVES = auto()
    """This rank was."""


class Steps:
    """`step`, `samples` and `epoch` finished, over all attempts.

    `heartbeat` is None where an observer reports steps. When a step ends, `learning_rate` is asked for the one that it
    was taken with, and `observed_rate` for the samples per second where it does not say on how many samples it was;
    `plotted` has names and values for TensorBoard, when the loss is shown. With `prints`, there is a line for people
    too. Without `has_epochs`, the epoch is not known before the first has ended.
    """

    def __init__(
        self,
        world: World,
        log: RunLog,
        heartbeat: Heartbeat | None,
        *,
        total_steps: int | None,
        learning_rate: Callable[[], float | None],
        observed_rate: Callable[[], float | None] = lambda: None,
        plot_every: int = PLOT_STEPS,
        plotted: Callable[[], Mapping[str, float]] = dict,
        prints: bool = False,
        has_epochs: bool = False,
        losses: FiniteLosses,
        passes: PassTimes,
        data_waits: DataWaits,
        has_newcomer: Callable[[], bool] = lambda: False,
        least: int | None = None,
        procs: int = 1,
    ) -> None:
        """`least`, with live recovery: ranks that were asked to stop leave alone if so many are left. `procs`: how many
        ranks a pod has, which leaves as a whole.
        """
        self._has_newcomer = has_newcomer
        self._least = least
        self._procs = procs
        self._stopping = 0
        """Ranks that were asked to stop, as the last vote of this group has it."""
        self.change = Change.NONE
        """After `agreed_to_stop` and `agreed_between_steps`, which found no stop; the same on the ranks that go on."""
        self.had_draws = True
        """After `agreed_to_stop`: whether a rank may have drawn random numbers in the step before; the same on all."""
        self.step = 0
        self.samples = 0
        self.epoch = 0
        self.total_steps = total_steps
        self._world = world
        self._log = log
        self._heartbeat = heartbeat
        self._learning_rate = learning_rate
        self._observed_rate = observed_rate
        self._plot_every = plot_every
        self._plotted = plotted
        self._prints = prints
        self._has_epochs = has_epochs
        self._metrics: dict[str, float] = {}
        """Measured since the figures of the last epoch were reported."""
        self._losses = losses
        self._passes = passes
        self._data_waits = data_waits
        self._stop = StopRequest()
        self._of_step = StepReduce(world)
        self._of_lost: StepResult | None = None
        """What is known of the last step, where its process group is lost."""
        self._between = StepReduce(world)
        self._nothing = torch.zeros((), device=world.device)
        self._has_loss = False
        self._has_begun = False
        self._step_log = StepLog(log, total_steps)
        self._rate: float | None = None
        """The throughput when the last step ended: its loss comes later."""
        self._learning_rate_of_step: float | None = None
        # A snapshot must hold the loss of its own last step, which is still on its way when it is taken.
        log.losses.before_save = self.record_loss

    @property
    def progress(self) -> Progress:
        """Where training stands."""
        return Progress(step=self.step, epoch=self.epoch, samples=self.samples)

    def listen(self) -> None:
        """From now on SIGTERM asks all ranks to stop."""
        self._stop.listen()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether SIGTERM has come to this rank."""
        return self._stop.raised

    def agreed_to_stop(self) -> bool:
        """At the end of a step, before `end`: whether all ranks stop, because of what one had been asked to when the
        step before ended.
        """
        self.record_loss()
        self.report_epoch()
        before = self._of_step.result()
        self.had_draws = before is None or before.has_drawn
        return self._agreed(before)

    def none_has_drawn(self, timeout: timedelta | None = None) -> bool:
        """Whether it is known that no rank has drawn random numbers in the last step. Waits for what the ranks say of
        it; raises RuntimeError after `timeout`, or if a rank was lost.
        """
        result = self._of_step.result(timeout) or self._of_lost
        return result is not None and result.step == self.step and not result.has_drawn

    def _agreed(self, result: StepResult | None) -> bool:
        self.change = Change.NONE
        if result is None:
            return False
        before, self._stopping = self._stopping, result.stopping
        if result.stopping and (self._least is None or self._world.size - result.stopping < self._least):
            return True
        if self._procs > 1 and result.stopping != before:
            # The vote may have come between the signals to two ranks of a pod, and all of them will leave: counted
            # now, every pod could leave and none save.
            return False
        if result.stopping:
            self.change = Change.LEAVES if result.is_stopping else Change.LEFT
        elif result.joining:
            self.change = Change.JOINED
        return False

    def end(
        self,
        loss: Tensor | float | None,
        *,
        weight: float | None,
        samples: int,
        epoch_end: bool,
        gradient_norm: Tensor | float | None,
        has_drawn: bool,
        has_updated: bool,
    ) -> None:
        """A step has ended, on `samples` samples of all ranks together (0 if unknown); see `Run.step_end`. `has_drawn`:
        whether this rank may have drawn random numbers in it. `has_updated`: whether there was an update.
        """
        self.step += 1
        self.samples += samples
        self._begin_reduce(loss, weight, gradient_norm, has_drawn=has_drawn, has_updated=has_updated)
        self.epoch += epoch_end
        self._learning_rate_of_step = self._learning_rate()
        self._report(samples)

    def record_loss(self) -> None:
        """Log the newest reduced loss, unless it is logged already. Raises LossNotFinite or RollBack, on all ranks
        alike, where the policy says so, and UserError where only some ranks had an update in that step.
        """
        result = self._of_step.result()
        if result is None or not self._has_loss or result.step <= self._log.losses.last_step:
            return
        if 0 < result.without_update < self._world.size:
            raise UserError(
                f"{result.without_update} of {self._world.size} ranks ended step {result.step} without an "
                "optimizer.step(), so the ranks have different weights: decide on what is the same on all, such as the "
                "norm of the gradients after they are reduced, not on the loss of one rank"
            )
        losses, rate = self._log.losses, self._rate
        losses.append(step=result.step, epoch=result.epoch, loss=result.loss, samples_per_second=rate)
        if result.step % self._plot_every == 0:
            self._step_log.plot(result, learning_rate=self._learning_rate_of_step, plotted=self._plotted())
            if self._prints:
                self._step_log.print_line(result)
        self._losses.seen(result.step, result.loss, result.gradient_norm)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Values of the program's own, such as those of the validation of an epoch."""
        self._metrics.update(metrics)

    def report_epoch(self) -> None:
        """Report the figures of an epoch that has ended, once: at the end of the step after it, when all are known."""
        losses = self._log.losses
        if losses.epoch is None or losses.epoch >= self.epoch:
            return
        epoch, metrics, self._metrics = losses.epoch, self._metrics, {}
        mean = losses.epoch_mean()
        figures = {EPOCH_LOSS: mean, **metrics}
        shown = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._log.event("epoch", epoch=epoch, step=losses.last_step, **shown)
        self._log.scalars(losses.last_step, {EPOCH_LOSS: mean})
        if self._heartbeat is not None:
            self._heartbeat.metrics(**{EPOCH_LOSS: mean})
        if self._prints:
            text = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
            self._log.print_line(f"epoch {epoch} (after step {losses.last_step}): {text}")

    def agreed_between_steps(self) -> bool:
        """The same vote in what is no step, where this is called again and again on all ranks alike."""
        if self._agreed(self._between.result()):
            return True
        if self.change is not Change.NONE:
            return False
        self._between.start(self._nothing, step=self.step, epoch=self.epoch, stop=self._stop.raised)
        return False

    def paused(self) -> None:
        """What comes now is no step: its time is not in the throughput."""
        self._step_log.paused()

    def lost_group(self) -> None:
        """The process group is lost, and what it was still reducing, but for what has arrived of the last step: an
        emergency snapshot may have to do with that.
        """
        with contextlib.suppress(RuntimeError):
            if self._of_step.is_complete:
                self.record_loss()
                self._of_lost = self._of_step.result()
        self._of_step.forget()
        self._between.forget()

    def regroup(self, progress: Progress) -> None:
        """Go on after `progress.step` in a new process group."""
        self.step, self.epoch, self.samples = progress.step, progress.epoch, progress.samples
        self._of_lost = None
        self._stopping = 0
        self._of_step.forget()
        self._between.forget()
        self._step_log.regrouped()

    def go_on(self) -> None:
        """What was no step has come to its end on all ranks."""
        self._between.result()

    def _begin_reduce(
        self,
        loss: Tensor | float | None,
        weight: float | None,
        gradient_norm: Tensor | float | None,
        *,
        has_drawn: bool,
        has_updated: bool,
    ) -> None:
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise UserError(f"the loss of a step is one number, and this one has {loss.numel()}: pass its mean")
        self._has_loss = loss is not None
        part = _plain(0.0 if loss is None else loss)
        if weight is None:
            part = part / self._world.size
        elif weight != 1.0:
            part = part * weight
        norm = _plain(gradient_norm) if isinstance(gradient_norm, Tensor) else gradient_norm
        self._of_step.start(
            part,
            step=self.step,
            epoch=self.epoch,
            stop=self._stop.raised,
            gradient_norm=norm,
            joining=self._has_newcomer(),
            has_drawn=has_drawn,
            has_updated=has_updated,
        )

    def _report(self, samples: int) -> None:
        """Tell the heartbeat, unless an observer does. The loss is that of the step before, which costs no wait."""
        if not self._has_begun:
            self._has_begun = True
            # Time to the first step is what a user waits for, and what a restart costs.
            self._log.event("first_step", step=self.step)
            if not self._stop.listens:
                self._log.print_line(
                    "SIGTERM has another handler since run.resume(), so the job will not stop in order when its pod "
                    "has to go: call run.listen() after what sets that handler, or leave it out"
                )
        if samples:
            self._step_log.trained(samples)
        self._rate = self._step_log.samples_per_second if samples else self._observed_rate()
        if self._heartbeat is None:
            return
        if self._heartbeat.phase != "train":
            self._heartbeat.enter("train")
        if (took := self._passes.after_step()) is not None:
            self._heartbeat.passes_took(took)
        if (waited := self._data_waits.of_step()) is not None:
            self._heartbeat.waited_for_data(waited)
        self._heartbeat.step(
            step=self.step,
            epoch=self.epoch if self.epoch or self._has_epochs else None,
            total_steps=self.total_steps,
            samples=self.samples if samples else None,
            loss=self._log.losses.last_loss,
            samples_per_second=self._rate,
            learning_rate=self._learning_rate_of_step,
        )


def _plain(value: Tensor | float) -> Tensor:
    """A tensor without its graph. A DTensor, as the norm of the gradients is with FSDP2, is made whole: a collective of
    its ranks.
    """
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device="cpu")  # the script's default type may be a smaller one
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
