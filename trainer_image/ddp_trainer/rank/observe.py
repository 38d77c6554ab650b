"""The progress of a script that knows nothing of DDPJob, through torch's global hooks.

    observer = observe(Heartbeat.from_env(), world_size)   # before the script starts
    ...                                                    # the script imports torch and trains
    observer.close()                                       # after it has returned

What is seen, and how:

- a step: a call of an optimizer's `step()` (torch.optim.optimizer.register_optimizer_step_post_hook). With several
  optimizers, steps are those of the one that has made most. Backward passes without a step are gradient accumulation.
  Calls for other parameters each, with no backward pass between them, are one step (`leading_optimizer`).
- the loss: the sum of the scalars that `backward()` was called on for this step, which is what the step descends,
  without the scale of a GradScaler; with LBFGS, that of the first evaluation. It is this rank's own.
- samples: the batches that a `torch.utils.data.DataLoader` yielded for those backward passes, each once, times the
  world size (`batch_sizes`).
- the wait for data: how long a DataLoader took to yield them, on the thread that makes the steps (`data_waits`).
- validation: a DataLoader that yields batch after batch without a backward pass.

A loss that is NaN or infinite is reported, and ends the script with the policies Stop and Rollback: without snapshots
of ours there is nothing to go back to.

What cannot be seen stays unknown (null in `/status`): a script without an optimizer of torch's has no steps, one
without a DataLoader no samples, and one on Megatron-LM no loss either, since its backward passes are only counted. A
script that resumes goes on from the steps that its optimizer has counted, as Adam does; after one that does not count,
such as SGD, steps are those of this process. The total and the epoch are known where the script uses transformers' or
Lightning's Trainer, metrics also where it uses Accelerate's `log`. `close` also takes every hook away; a script that
attaches (`ddp_trainer.attach`) does so first, since it reports for itself. Where a hook fails, as on a tensor of an
unusual kind, it says so, and nothing is observed from there on: the script trains on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from ddp_trainer.contract.exit_codes import LossNotFinite
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.standard_error import say
from ddp_trainer.rank import (
    data_waits,
    observe_accelerate,
    observe_lightning,
    observe_megatron,
    observe_torch,
    optimizer_steps,
)
from ddp_trainer.rank.after_import import after_import
from ddp_trainer.rank.batch_sizes import batch_size
from ddp_trainer.rank.captured_graphs import at_replays
from ddp_trainer.rank.dynamo import TRACE_RULES, keep_out_of_graphs
from ddp_trainer.rank.leading_optimizer import Lead

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

MOST_LOADERS: Final = 8
"""Batches before the first backward pass of each step that may be those of several loaders."""
FETCHES_OF_VALIDATION: Final = 3
"""Batches in a row without a backward pass that tell validation from a loader that is read ahead of training. More
where a step has as many backward passes: Hugging Face's Trainer reads all batches of a step before the first.
"""

SMOOTHING: Final = 0.9
"""Weight of the past in the moving average of samples per second."""

_current: ScriptObserver | None = None
_forks = 0
"""Between this process and the one that imported this module."""
_NO_PROCESS: Final = -1
"""In place of that number, for what observes no process any more."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def _keep_out_of_graphs() -> None:
    """Let torch.compile leave alone what the hooks call, as it does with torch's own Python code."""
    keep_out_of_graphs(__package__)
    keep_out_of_graphs(Heartbeat.__module__)


def observe(heartbeat: Heartbeat, world_size: int, *, non_finite_loss: str = "Warn") -> ScriptObserver:
    """Observe the script that this process is about to run, from the moment it imports torch."""
    global _current
    close_observer()
    heartbeat.enter("script")
    _current = ScriptObserver(heartbeat, world_size, non_finite_loss=non_finite_loss)
    _current.after_import("torch", _current.hook_into_torch)
    _current.after_import(observe_torch.DCP_STATES, functools.partial(observe_torch.hook_into_dcp, _current))
    _current.after_import("transformers.trainer", _current.hook_into_transformers)
    for connector in observe_lightning.MODULES:
        _current.after_import(connector, functools.partial(_current.hook_into_lightning, connector))
    _current.after_import("accelerate.accelerator", _current.hook_into_accelerate)
    _current.after_import(observe_megatron.SCHEDULES, functools.partial(observe_megatron.hook_into, _current))
    return _current


def observing() -> ScriptObserver | None:
    """What observes this process, if anything does."""
    return _current


def close_observer() -> None:
    """Stop observing this process, if it is observed: somebody else reports its progress now."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


class ScriptObserver:
    """Turns what the hooks see into heartbeats. `world_size` is the number of ranks that train on samples."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        non_finite_loss: str = "Warn",
    ) -> None:
        self.last_loss: Tensor | None = None
        """Of this rank's last step."""
        self.data_waits = data_waits.DataWaits()
        self._non_finite_loss = non_finite_loss
        self._checks_loss = True
        self._is_finite = True
        self._heartbeat = heartbeat
        self._world_size = world_size
        self._clock = clock
        self._forks = _forks
        self._undo: list[Callable[[], None]] = []
        self._lead = Lead()
        self._step = 0
        """Of this process, in all trainings."""
        self._earlier = 0
        """Those of trainings before the present one."""
        self._before: int | None = None
        """What the number of a step in the run is more than that; None until it is known. Less than 0 where earlier
        trainings have made more steps than the present one has resumed after.
        """
        self._total_steps: int | None = None
        self.epoch: int | None = None
        self.loss: float | None = None
        """The loss that the script itself logs, which is shown instead of the one that `backward()` gets."""
        self.phase = "script"
        self._loss: Tensor | None = None
        self._scaled: tuple[ref[Tensor], Tensor] | None = None
        self.has_stepped = False
        """Whether an optimizer has made a step since a GradScaler was last asked for one."""
        self._fetched: int | None = None
        """Samples of the batch that was fetched last."""
        self._fetches = 0
        """Batches since the last backward pass."""
        self._unused = 0
        """Batches that no backward pass has been made for."""
        self._backwards = 0
        """Backward passes since the last step."""
        self.passes = 0
        """All of them, also those on what is no loss."""
        self.makes_state = False
        """Whether a step is one by which torch makes the state of an optimizer."""
        self._read_ahead = 2
        """Batches that may be read before the first backward pass of a step: all of the step, and accelerate's loader
        has one more; and as many as were read before those of two steps in a row, where each step has several loaders.
        """
        self._read_before = 0, 0
        """Batches before the first backward pass of the last step, and of this one."""
        self._step_samples: int | None = 0
        self._samples: int | None = 0
        self.samples_per_second: float | None = None
        """Of all ranks, a moving average; None while it is not known."""
        self._stepped_at: float | None = None

    @property
    def heartbeat(self) -> Heartbeat:
        """What it reports to."""
        return self._heartbeat

    @property
    def step(self) -> int:
        """Optimizer steps seen so far."""
        return self._step

    def begins(self, *, step: int, total_steps: int | None, run_checks_loss: bool = False) -> None:
        """Training goes on after `step` steps of an earlier run, towards `total_steps`. A process may have several, as
        with Lightning's Tuner or a Trainer for each fold: each counts anew, with the optimizer that leads in it.
        `run_checks_loss` says that a run looks at the losses of all ranks; a library's Trainer leaves that to the
        observer.
        """
        self._before, self._total_steps = step - self._step, total_steps
        self._earlier, self.loss = self._step, None
        self._loss, self._is_finite = None, True
        self._heartbeat.forgets_loss()
        self._lead.begins()
        self._checks_loss = self._checks_loss and not run_checks_loss
        self._heartbeat.resumed(step)

    def divides_data_among(self, ranks: int) -> None:
        """A Trainer's own count of the ranks. Without use_cpu=True, that of transformers leaves a process group on CPUs
        unused, and each rank takes all steps on all the data.
        """
        if ranks < self._world_size and self._heartbeat.rank == 0:
            say(
                f"ddp_trainer: the Trainer counts {ranks} of the {self._world_size} ranks, so each trains on all the "
                "data, and for itself; on CPUs it takes TrainingArguments(use_cpu=True)"
            )

    def skipped(self) -> None:
        """The run has a step without an update."""
        self._before = (self._before or 0) + 1

    def counted(self, step: int) -> None:
        """A Trainer has made its step of this number, or has left the optimizer's out, as a GradScaler does: what its
        loss was is in none that follows. One whose steps have several of the optimizer's, as with PPO, counts fewer:
        the number does not go back.
        """
        self._before, self._loss = max(self._before or 0, step - self._step), None

    def validates(self) -> None:
        """A batch of a validation is done."""
        self._enter("validate")
        self._heartbeat.beat()

    def ends(self, *, epochs: int) -> None:
        """Training is done, after so many epochs that are finished."""
        self.epoch = epochs
        self._heartbeat.epochs_are(epochs)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Values that the script has measured, such as eval_loss."""
        self._heartbeat.metrics(**metrics)

    def fetched(self, batch: object, samples: int | None = None) -> None:
        """A DataLoader has yielded a batch. `samples` is how many it puts into one, but for the last, if it says so."""
        if _forks != self._forks:
            return
        self._fetches += 1
        self._unused += 1
        self._fetched = batch_size(batch, samples)
        if self._fetches >= FETCHES_OF_VALIDATION and self._fetches > self._read_ahead and self._step:
            self._unused = min(self._unused, self._read_ahead)
            self.validates()

    def scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """A GradScaler has made `scaled` of a loss, on which `backward()` will be called."""
        if _forks == self._forks:
            self._scaled = (ref(scaled), loss.detach())

    def overflowed(self, optimizer: Optimizer) -> None:
        """A GradScaler has left out the step of an optimizer: what its loss was is in no step."""
        if _forks == self._forks and self._lead.optimizer() in (None, optimizer):
            self._loss = None

    def backward_begins(self, root: Tensor) -> None:
        """`backward()` is called on `root`."""
        if _forks != self._forks or root.numel() != 1:
            return
        if not (self._step or self._unused) and root.requires_grad and root.grad_fn is None:
            return  # before any batch, what nothing has computed only wakes CUDA up, and may be empty memory
        scaled = self._scaled
        loss = scaled[1] if scaled is not None and scaled[0]() is root else root.detach()
        if at_replays(before=functools.partial(self.or_give_up, self._backward_begins_with, loss)):
            return  # each replay writes into the same tensor
        # a script may reduce its loss over all ranks in place, for a log of its own, before or after the step
        self._backward_begins_with(loss.clone())

    def pass_begins(self) -> None:
        """A backward pass begins on what need be no loss, for samples that need not be of this rank alone."""
        if _forks != self._forks:
            return
        if not at_replays(before=functools.partial(self.or_give_up, self._backward_begins_with, None)):
            self._backward_begins_with(None)

    def _backward_begins_with(self, loss: Tensor | None) -> None:
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss.to(self._loss.device)
        self._reads_of_step()
        self._backwards += 1
        fetched = self._fetched
        if loss is None or fetched is None or self._step_samples is None:
            self._step_samples = None
        elif self._unused:  # else another loss of the same batch, as a GAN has
            self._unused -= 1
            self._step_samples += fetched
        if self.phase != "train":
            self._enter("train" if self._step else "first_step")

    def _reads_of_step(self) -> None:
        """The batches read so far were for this step: at its first backward pass, and at its end, where gradients come
        in another way than from `backward()` on a loss.
        """
        if not self._backwards:
            last, now = self._read_before
            self._read_before = last, now + self._fetches
        self._fetches = 0

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        self.has_stepped = True
        if _forks != self._forks or self.makes_state:
            return
        if at_replays(after=functools.partial(self.or_give_up, self.stepped, optimizer)):
            return
        if self._lead.is_rest_of_step(optimizer, self.passes):
            return
        if self._lead.optimizer() is not optimizer and not self._takes_the_lead(optimizer):
            return  # another optimizer of the same step
        if not self._step:
            self._say_if_alone()
        before = self._steps_before(optimizer) if self._before is None else self._before
        now, steps = self._clock(), self._step + 1
        self._step = steps
        samples, self._step_samples = self._step_samples, 0
        if samples == 0 and self._backwards:
            samples = self._fetched  # a step on a batch of an earlier one
        self._reads_of_step()
        self._read_ahead = max(self._read_ahead, self._backwards + 1, min(*self._read_before, MOST_LOADERS))
        self._read_before = self._read_before[1], 0
        self._backwards = 0
        self._samples = None if not samples or self._samples is None else self._samples + samples * self._world_size
        if self.phase != "train":
            self._enter("train")
        if (waited := self.data_waits.of_step()) is not None:
            self._heartbeat.waited_for_data(waited)
        self._heartbeat.step(
            step=before + steps,
            epoch=self.epoch,
            total_steps=self._total_steps,
            samples=self._samples,
            loss=self._loss,
            shown_loss=self.loss,
            samples_per_second=self._new_rate(samples, now),
            learning_rate=_learning_rate(optimizer),
        )
        self.last_loss, self._loss = self._loss, None
        self._stepped_at = now
        if self._checks_loss:
            self._check_loss(before + steps)

    def _say_if_alone(self) -> None:
        """At the first step: ranks that have not met do not know of each other."""
        distributed = sys.modules["torch.distributed"]
        has_met = distributed.is_available() and distributed.is_initialized()
        if has_met or self._world_size == 1 or self._heartbeat.rank:
            return
        say(
            f"ddp_trainer: the script takes its first step, and its {self._world_size} ranks have not met in a process "
            "group: each trains for itself, on all the data, and writes the same files. Call "
            "torch.distributed.init_process_group() and wrap the model in DistributedDataParallel (MMEngine's scripts: "
            "--launcher pytorch), or set nodes: 1 and procsPerNode: 1"
        )

    def _steps_before(self, optimizer: Optimizer) -> int:
        """At the first step of this process: those before it are in the state that the script has loaded, if any."""
        before = self._before = max(0, (optimizer_steps.steps_of(optimizer) or 1) - 1)
        if before:
            self._heartbeat.resumed(before, 0 if self._samples is not None else None)
        return before

    def _takes_the_lead(self, optimizer: Optimizer) -> bool:
        """Whether this step, of an optimizer that did not lead, is a step of the training, in which it leads from now
        on. Where the leader has lapsed it leads too, but its steps count from the next one on.
        """
        change = self._lead.goes_to(optimizer, step=self._step, led=self._step - self._earlier)
        if change == "lapsed":  # what has come since then is of many steps
            self._loss, self._step_samples, self._backwards = None, 0, 0
        return change == "taken"

    def _check_loss(self, step: int) -> None:
        """The one that the heartbeat has read: not that of each step is, and NaN does not go away. Also where another
        one is shown: Hugging Face's Trainer leaves NaN out of the mean that it logs (logging_nan_inf_filter).
        """
        loss = self._heartbeat.loss_of_step
        if loss is None or math.isfinite(loss):
            loss = self._heartbeat.loss
        is_finite = loss is None or math.isfinite(loss)
        if is_finite and self._is_finite:
            return
        self._heartbeat.non_finite_loss(None if is_finite else step)
        if is_finite or not self._is_finite:
            self._is_finite = is_finite
            return
        self._is_finite = False
        what = f"the loss of step {step}, or of one shortly before, is {loss}"
        if self._non_finite_loss != "Warn":
            raise LossNotFinite(what)
        say(f"ddp_trainer: {what}; training continues")

    @contextmanager
    def evaluated_again(self) -> Iterator[None]:
        """What an optimizer does with its closure in this step after the first time: other points, the same batch."""
        seen = self._loss, self._step_samples, self._unused, self._backwards
        yield
        self._loss, self._step_samples, self._unused, self._backwards = seen

    def hook_into_torch(self) -> None:
        """Put the hooks in place; torch has been imported."""
        self.after_import(TRACE_RULES, _keep_out_of_graphs)
        observe_torch.hook_into_torch(self)

    def hook_into_transformers(self) -> None:
        """Let Hugging Face's Trainer say what torch does not show."""
        from ddp_trainer.rank.observe_transformers import report_to

        report_to(self)

    def hook_into_lightning(self, connector: str) -> None:
        """Let Lightning's Trainer say what torch does not show."""
        module = sys.modules[connector]
        self.wrap(module, observe_lightning.LOADER, observe_lightning.with_report(module, self))

    def hook_into_accelerate(self) -> None:
        """See what `Accelerator.log` is called with."""
        accelerator = sys.modules["accelerate.accelerator"].Accelerator
        self.wrap(accelerator, "log", observe_accelerate.with_report(self))

    def after_import(self, name: str, action: Callable[[], None]) -> None:
        """Call `action` once the module `name` has been imported. An error in it is printed, and stops nothing."""

        def try_it() -> None:
            try:
                action()
            except Exception as error:  # a release of torch without one of these hooks still trains
                say(f"ddp_trainer: this script's progress cannot be observed: {error!r}")

        self.at_close(after_import(name, try_it))

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put what `wrapper` makes of it in the place of a function, until the observer is closed."""
        original = getattr(owner, name)
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(owner, name, wrapped)

        def undo() -> None:
            # a library that wrapped it later keeps our wrapper, which passes every call on
            if getattr(owner, name) is wrapped:
                setattr(owner, name, original)

        self.at_close(undo)

    def at_close(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the observer is closed."""
        self._undo.append(undo)

    def or_give_up(self, look: Callable[..., None], *arguments: Any) -> None:
        """`look`, where that is rare. What comes in every step has a `try` of its own, which costs no call."""
        try:
            look(*arguments)
        except LossNotFinite:
            raise
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """What only looks ends no script. The hooks stay, and do nothing: torch goes through them at this moment."""
        if self._forks == _NO_PROCESS:
            return
        self._forks = _NO_PROCESS
        with contextlib.suppress(Exception):
            say(f"ddp_trainer: this script's progress cannot be observed any longer: {error!r:.300}")
        with contextlib.suppress(Exception):
            self._heartbeat.enter("script")  # in which it may be silent for long
        self._forget()

    def close(self) -> None:
        """Take the hooks away."""
        while self._undo:
            self._undo.pop()()
        self._forget()

    def _forget(self) -> None:
        self.last_loss = self._loss = self._scaled = None
        # for what a library still calls: its callbacks stay where they are
        self._heartbeat = Heartbeat(None)

    def done(self) -> None:
        """The script has returned, and whatever it trained is trained."""
        if self._step:
            self._enter("done")
        self.close()

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._stepped_at = None
            self._heartbeat.enter(phase)

    def _new_rate(self, samples: int | None, now: float) -> float | None:
        """The moving average; the time of a validation is in none of its intervals."""
        if samples and self._stepped_at is not None and now > self._stepped_at:
            rate = samples * self._world_size / (now - self._stepped_at)
            before = self.samples_per_second
            self.samples_per_second = rate if before is None else SMOOTHING * before + (1 - SMOOTHING) * rate
        return self.samples_per_second


def _learning_rate(optimizer: Optimizer) -> float | None:
    rate = optimizer.param_groups[0].get("lr")
    # a tensor may lie on a GPU, and reading it would wait for all that is queued there
    return float(rate) if isinstance(rate, (float, int)) else None
