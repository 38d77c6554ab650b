"""The small asynchronous all-reduce of each step: its mean loss, and how many ranks were asked to stop.

A rank that was asked to stop (SIGTERM reaches one pod of many) must not stop alone: the others would wait for
it. So each rank adds a stop flag to its part of the loss. The result is read one step later, when it
has long arrived, so no rank waits for it, and all ranks read it at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.rank.world import World

_VALUES: Final = 5
"""The loss, ranks asked to stop, the gradient norm, whether a rank joins, whether one has drawn random numbers."""


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


class StepReduce:
    """One asynchronous all-reduce at a time: `start` launches it, `result` waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: tuple[int, int, bool] | None = None
        self._result: StepResult | None = None
        self._buffer = torch.zeros(_VALUES, dtype=torch.float64, device=world.device)
        cuda = world.device.type == "cuda"
        self._host = torch.zeros(_VALUES, dtype=torch.float64, device="cpu", pin_memory=cuda)
        self._copied = torch.Event("cuda") if cuda else None
        self._work: dist.Work | None = None
        self._has_norm = False

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
    ) -> None:
        """Reduce finished step number `step`: this rank's part of its mean loss, whether it was asked to stop, the norm
        of its gradients, if it is known, and whether it has drawn random numbers.
        """
        assert self._pending is None, "the last result was not read"
        self._pending = (step, epoch, stop)
        self._buffer[0] = loss_part
        self._buffer[1] = float(stop)
        self._buffer[3] = float(joining)
        self._buffer[4] = float(has_drawn)
        if gradient_norm is not None or self._has_norm:
            self._buffer[2] = 0.0 if gradient_norm is None else gradient_norm
            self._has_norm = gradient_norm is not None
        if self._world.size > 1:
            self._work = dist.all_reduce(self._buffer, async_op=True)
        if self._copied is not None:
            if self._work is not None:
                # only makes the device's own queue wait, not this thread
                self._work.wait()
            self._host.copy_(self._buffer, non_blocking=True)
            self._copied.record()

    @property
    def is_complete(self) -> bool:
        """Whether `result` does not wait."""
        return self._work is None or self._work.is_completed()

    def forget(self) -> None:
        """Drop what is under way: its group is gone."""
        self._pending = self._work = self._result = None

    def result(self, timeout: timedelta | None = None) -> StepResult | None:
        """The newest result, however often it is asked for; None before the first. With gloo, raises RuntimeError after
        `timeout`.
        """
        if self._pending is not None:
            if self._copied is not None:
                self._copied.synchronize()
            else:
                if self._work is not None:
                    self._work.wait() if timeout is None else self._work.wait(timeout)
                self._host.copy_(self._buffer)
            loss, stop, norm, joining, drawn = self._host.tolist()
            step, epoch, is_stopping = self._pending
            self._result = StepResult(
                step, epoch, loss, round(stop), is_stopping, norm / self._world.size, joining > 0, drawn > 0
            )
            self._pending = self._work = None
        return self._result


def on_any_rank(world: World, *flags: bool) -> tuple[bool, ...]:
    """Each flag on every rank as soon as one rank has raised it. Waits for all ranks."""
    raised = torch.tensor([float(flag) for flag in flags], device=world.device)
    if world.size > 1:
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return tuple(value > 0 for value in raised.tolist())
