"""Tasks that do something to the machine at an exact step, named by tests as `--task faulty_tasks:Name`."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ddp_trainer.snapshots import schedule
from ddp_trainer.tasks.digits import Digits

RANK = int(os.environ.get("RANK", "0"))


class AtSteps(Digits):
    """Digits on one micro-batch a rank; `before_step` is called on rank 0 before each step's loss.

    The very first loss is a rehearsal, before step 1.
    """

    def __init__(self) -> None:
        super().__init__(width=8, dropout=0.0)
        self._step = 0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if output.requires_grad:
            if RANK == 0:
                self.before_step(self._step)
            self._step += 1
        return super().loss(output, batch)

    def before_step(self, step: int) -> None:
        """What is to happen."""


class FullVolume(AtSteps):
    """The volume has no byte left from step 3 to step 24."""

    ballast = Path(os.environ.get("DDPJOB_SHARED", "."), "ballast")

    def before_step(self, step: int) -> None:
        if step == 3:
            with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if step == 24:
            self.ballast.unlink()


released = threading.Event()
fsync, write = os.fsync, os.write


def slow_fsync(descriptor: int) -> None:
    """Comes back only once the volume is released."""
    released.wait(60)
    fsync(descriptor)


def slow_write(descriptor: int, data: bytes) -> int:
    """The same, for the logs."""
    if "logs" in Path(f"/proc/self/fd/{descriptor}").readlink().parts:
        released.wait(60)
    return write(descriptor, data)


class SlowVolume(AtSteps):
    """Whatever is synced before step 22, of snapshots and of logs, is on the disk after step 22."""

    def __init__(self) -> None:
        super().__init__()
        os.fsync, os.write = slow_fsync, slow_write  # type: ignore[assignment]
        released.set()

    def before_step(self, step: int) -> None:
        if step == 2:
            released.clear()
        if step == 22:
            released.set()


class Hasty(Digits):
    """Digits whose `auto` interval begins with a second, not with a minute."""

    def __init__(self) -> None:
        super().__init__(width=8)
        schedule.AUTO_BEGINS_WITH = 1  # type: ignore[misc]
