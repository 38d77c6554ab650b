"""What all ranks must know alike after each step - its mean loss, and whether to stop - for the price of one
small all-reduce.

A rank that was asked to stop (SIGTERM reaches one pod of many) must not stop alone: the others would wait for
it. So each step every rank votes, and the votes travel with the loss. The result is read one step later, when
it has long arrived, so no rank ever waits for it, and all ranks read it at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.distributed import World


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one step's vote, the same on every rank. `epoch` is the one that the step belonged to."""

    step: int
    epoch: int
    loss: float
    stop: bool


class StepVote:
    """One vote at a time: `cast` begins it, `verdict` ends it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cast: tuple[int, int] | None = None
        self._verdict: Verdict | None = None
        self._ballot = torch.zeros(2, dtype=torch.float64, device=world.device)
        cuda = world.device.type == "cuda"
        self._result = torch.zeros(2, dtype=torch.float64, pin_memory=cuda)
        self._copied = torch.Event("cuda") if cuda else None
        self._work: dist.Work | None = None

    def cast(self, loss_part: Tensor, *, step: int, epoch: int, stop: bool) -> None:
        """Vote on finished step number `step`: this rank's part of its mean loss, and whether it was asked to
        stop.
        """
        assert self._cast is None, "the last vote was not read"
        self._cast = (step, epoch)
        self._ballot[0] = loss_part
        self._ballot[1] = float(stop)
        if self._world.size > 1:
            self._work = dist.all_reduce(self._ballot, async_op=True)
        if self._copied is not None:
            if self._work is not None:
                # only makes the device's own queue wait, not this thread
                self._work.wait()
            self._result.copy_(self._ballot, non_blocking=True)
            self._copied.record()

    def verdict(self) -> Verdict | None:
        """What the newest vote came to, however often it is asked for; None before the first."""
        if self._cast is not None:
            if self._copied is not None:
                self._copied.synchronize()
            else:
                if self._work is not None:
                    self._work.wait()
                self._result.copy_(self._ballot)
            loss, stop = self._result.tolist()
            self._verdict = Verdict(*self._cast, loss, stop > 0)
            self._cast = self._work = None
        return self._verdict


def agreed(world: World, *flags: bool) -> tuple[bool, ...]:
    """Each flag on every rank as soon as one rank has raised it. Waits for all ranks."""
    votes = torch.tensor([float(flag) for flag in flags], device=world.device)
    if world.size > 1:
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return tuple(vote > 0 for vote in votes.tolist())
