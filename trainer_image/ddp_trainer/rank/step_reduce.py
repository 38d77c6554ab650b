"""The small asynchronous reduction of each step: its mean loss, and how many ranks were asked to stop.

A rank that was asked to stop (SIGTERM reaches one pod of many) must not stop alone: the others would wait for
it. So each rank adds a stop flag to its part of the loss. The result is read one step later, when it
has long arrived, so no rank waits for it, and all ranks read it at the same step.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.rank.collectives import all_gather_single
from ddp_trainer.rank.world import World

_VALUES: Final = 6
"""The loss, the gradient norm, ranks asked to stop, whether a rank joins, whether one has drawn random numbers, ranks
without an update.
"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The reduced values of one step. `epoch` is the one that the step belonged to."""

    step: int
    epoch: int
    loss: float
    stopping: int
    """Ranks that had been asked to stop."""

    is_stopping: bool
    """Whether this rank is one of them. This value differs between ranks; all others are the same."""

    gradient_norm: float = 0.0
    """The mean over ranks; 0 where it is not known."""

    joining: bool = False
    """Whether a new rank waits to join."""

    has_drawn: bool = True
    """Whether a rank may have drawn random numbers in this step."""

    without_update: int = 0
    """Ranks that have left the update out."""


class StepReduce:
    """One asynchronous reduction at a time: `start` launches it, `result` waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: tuple[int, int, bool] | None = None
        self._result: StepResult | None = None
        is_on_device = world.device.type == "cuda"
        self._sums: _HostSums | _DeviceSums = _DeviceSums(world, world.device) if is_on_device else _HostSums(world)

    def start(
        self,
        loss_part: Tensor,
        *,
        step: int,
        epoch: int,
        stop: bool,
        gradient_norm: Tensor | float | None = None,
        joining: bool = False,
        has_drawn: bool = True,
        has_updated: bool = True,
    ) -> None:
        """Reduce finished step number `step`: this rank's part of its mean loss, whether it was asked to stop, the norm
        of its gradients, if it is known, whether it has drawn random numbers, and whether there was an update.
        """
        assert self._pending is None, "the last result was not read"
        self._pending = (step, epoch, stop)
        if isinstance(self._sums, _HostSums) and self._world.size == 1 and _is_on_own_device(loss_part):
            # Of a program on one GPU, without a model of its own here and without a process group: nothing said so
            # before. To read the loss now would wait for all that is queued on the device.
            self._sums = _DeviceSums(self._world, loss_part.device)
        norm = 0.0 if gradient_norm is None else gradient_norm
        self._sums.start(loss_part, norm, stop, joining, has_drawn, not has_updated)

    @property
    def is_complete(self) -> bool:
        """Whether `result` does not wait."""
        return self._sums.is_complete

    def forget(self) -> None:
        """Drop what is under way: its group is gone."""
        self._pending = self._result = None
        self._sums.forget()

    def result(self, timeout: timedelta | None = None) -> StepResult | None:
        """The newest result, however often it is asked for; None before the first. With gloo, raises RuntimeError after
        `timeout`.
        """
        if self._pending is not None:
            loss, norm, stop, joining, drawn, without = self._sums.wait(timeout)
            step, epoch, is_stopping = self._pending
            mean = norm / self._world.size
            self._result = StepResult(
                step, epoch, loss, round(stop), is_stopping, mean, joining > 0, drawn > 0, round(without)
            )
            self._pending = None
        return self._result


class _HostSums:
    """Where the values are in the memory of the host. Gloo sends half as many messages to gather as to reduce, and each
    wakes two threads; so each rank sums up what it has gathered. Between two ranks to reduce is faster.

    Beside a step, code that is in no cache takes several times as long. So nothing here goes through more of torch and
    NumPy than it has to.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._work: dist.Work | None = None
        self._own_group: dist.ProcessGroup | None = None
        """Where the default group takes no tensors of the host, as one of XCCL or HCCL alone."""
        if world.size > 1 and dist.is_initialized() and "cpu" not in dist.distributed_c10d._device_capability():
            self._own_group = dist.new_group(backend="gloo")
        self.forget()

    def start(self, *values: Tensor | float) -> None:
        for place, value in enumerate(values):
            self._values[place] = float(value)
        size = self._world.size
        if size == 1:
            self._all = self._own
        elif size == 2 or self._own_group is not None or dist.get_backend() != dist.Backend.GLOO:
            self._all = self._own
            if (group := dist.group.WORLD) is None:
                raise RuntimeError("the process group was destroyed before the end of the step")
            # as dist.all_reduce, in two thirds of the time
            self._work = (self._own_group or group).allreduce([self._all])
        else:
            if len(self._all) != size * _VALUES:
                self._all = torch.zeros(size * _VALUES, dtype=torch.float64, device="cpu")
            self._work = all_gather_single(self._all, self._own, async_op=True)

    @property
    def is_complete(self) -> bool:
        return self._work is None or self._work.is_completed()

    def forget(self) -> None:
        # a collective that failed may still hold the buffers
        self._own = torch.zeros(_VALUES, dtype=torch.float64, device="cpu")
        self._values = self._own.numpy()
        """The same memory."""
        self._all = self._own
        self._work = None

    def wait(self, timeout: timedelta | None) -> list[float]:
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._work = None
        found: list[float] = self._all.tolist()
        # sum() has other bits from Python 3.12 on
        return [functools.reduce(operator.add, found[place::_VALUES]) for place in range(_VALUES)]


class _DeviceSums:
    """Where they are in the memory of a device, which does not wait for the host, nor the host for it.

    NCCL's watchdog ends the kernels of a collective that has failed, and the device goes on with whatever is in the
    buffers until the process is aborted. So the ranks are counted: the collectives of a group run in their order, and
    where all ranks are in this sum, those of the step before it are whole too.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._buffer = torch.zeros(_VALUES + 1, dtype=torch.float64, device=device)
        self._host = torch.zeros(_VALUES + 1, dtype=torch.float64, device="cpu", pin_memory=True)
        self._flags = torch.zeros(_VALUES - 1, dtype=torch.float64, device="cpu", pin_memory=True)
        self._copied = torch.Event("cuda")

    def start(self, loss: Tensor | float, norm: Tensor | float, *flags: bool) -> None:
        self._buffer[0] = loss
        self._buffer[1] = norm
        self._flags.numpy()[:] = [*flags, True]
        self._buffer[2:].copy_(self._flags, non_blocking=True)
        if self._world.size > 1:
            work = dist.all_reduce(self._buffer, async_op=True)
            # only makes the device's own queue wait, not this thread
            work.wait()
        self._host.copy_(self._buffer, non_blocking=True)
        self._copied.record()

    @property
    def is_complete(self) -> bool:
        return self._copied.query()

    def forget(self) -> None:
        """The device goes on by itself."""

    def wait(self, timeout: timedelta | None) -> list[float]:
        self._copied.synchronize()
        *values, ranks = self._host.tolist()
        if ranks != self._world.size:
            raise RuntimeError(
                f"the NCCL communicator was aborted: {ranks:g} of {self._world.size} ranks are in the sum of the last "
                "step, and its gradients may lack some as well"
            )
        return values


def _is_on_own_device(value: Tensor) -> bool:
    """Whether it is on the GPU whose stream the event of `_DeviceSums` is recorded in."""
    return value.is_cuda and value.get_device() == torch.cuda.current_device()


def on_any_rank(world: World, *flags: bool) -> tuple[bool, ...]:
    """Each flag on every rank as soon as one rank has raised it. Waits for all ranks."""
    raised = torch.tensor([float(flag) for flag in flags], device=world.device)
    if world.size > 1:
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return tuple(value > 0 for value in raised.tolist())
