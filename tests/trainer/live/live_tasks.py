"""A task whose steps take a while, for tests that end ranks in the middle of training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.live import watch
from ddp_trainer.live.connections import STUCK_SECONDS
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.tasks.digits import Digits

ALONE_STEPS = 3
PATIENCE_SECONDS = 180.0
FAILS_AT = 10
SEEN = "seen"
VICTIM = "victim"
HELD = "held"
"""Files of the volume."""


class Slow(Digits):
    """Digits with steps of at least `seconds`; nothing is random. With fewer than `ranks`, a few steps are taken, and
    then a new rank is waited for: however slow the machine is, it comes before the end. `watched` holds the second step
    after that until the test has seen the first (SEEN). With `killed_after`, the last rank is killed after that step.
    """

    def __init__(
        self, seconds: float = 0.05, ranks: int = 3, watched: bool = False, killed_after: int | None = None
    ) -> None:
        super().__init__(width=8, dropout=0.0)
        self._killed_after = killed_after
        self._victim: Victim | None = None
        self._seconds, self._ranks, self._is_watched = seconds, ranks, watched
        self._steps_alone = 0
        self._steps_again: int | None = None
        """With all ranks, after some of them were missing."""
        self._most = 0
        """Samples of the first micro-batch: with fewer ranks there is not more memory."""

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self._most = self._most or len(batch[1])
            assert len(batch[1]) <= self._most
        if torch.is_grad_enabled() and self._seconds:
            is_small = dist.is_initialized() and dist.get_world_size() < self._ranks
            self._steps_alone = self._steps_alone + 1 if is_small else 0
            if is_small:
                self._steps_again = 0
            elif self._steps_again is not None:
                self._steps_again += 1
                if self._is_watched and self._steps_again == 2:
                    _await_witness()
            if self._steps_alone > ALONE_STEPS:
                await_new_rank()
            if self._killed_after is not None:
                if self._victim is None:
                    self._victim = Victim(self._killed_after)
                self._victim.step()
            time.sleep(self._seconds * (10 if is_small else 1))
        return super().loss(output, batch)


class Failing(Slow):
    """Slow until all ranks fail alike, or with `alone` only that of node rank 0. What it saves then takes `saving`
    seconds, by default more than a rank may be stuck. With `alone` no rank asks the next one whether it is alive.
    """

    def __init__(self, alone: bool = False, saving: float = STUCK_SECONDS + 2) -> None:
        super().__init__(ranks=2)
        self._fails_alone = alone
        self._fails = not alone or os.environ["DDPJOB_NODE_RANK"] == "0"
        self._saving = saving
        self._steps = 0
        if alone:
            watch.WATCH_SECONDS = PATIENCE_SECONDS  # type: ignore[misc]

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._steps += torch.is_grad_enabled()
        if self._fails and self._steps == FAILS_AT:
            _save_slowly(self._saving)
            if not self._fails_alone:
                dist.barrier()  # or one ends while the other is still at the end of the step before, and takes it again
            raise AssertionError("a label is out of range")
        return super().loss(output, batch)


def _save_slowly(seconds: float) -> None:
    save = SnapshotStore.save

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return save(*args, **named)

    SnapshotStore.save = slow  # type: ignore[method-assign]


def _await_witness() -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not Path(os.environ["DDPJOB_SHARED"], SEEN).exists():
        assert time.monotonic() < deadline, f"the test has seen nothing within {PATIENCE_SECONDS} s"
        time.sleep(0.02)


class Victim:
    """If this is the first process of the last rank, it goes no further than `last_step` steps, until it is killed: it
    is not at the end before that, and HELD says that it is there. The process that takes its place goes on. Made at the
    first step.
    """

    def __init__(self, last_step: int) -> None:
        self._left = last_step
        self._is_it = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if self._is_it:
            try:
                Path(os.environ["DDPJOB_SHARED"], VICTIM).touch(exist_ok=False)
            except FileExistsError:
                self._is_it = False

    def step(self) -> None:
        """The next step begins."""
        if self._is_it and self._left == 0:
            Path(os.environ["DDPJOB_SHARED"], HELD).touch()
            time.sleep(PATIENCE_SECONDS)
            raise AssertionError(f"it was not killed within {PATIENCE_SECONDS} s")
        self._left -= 1


def await_new_rank() -> None:
    """Until a process has registered since the newest view: it asks to join right after that."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    (views,) = Path(os.environ["DDPJOB_SHARED"]).glob("checkpoints/*/views/*")
    while time.monotonic() < deadline:
        entered, decided = (
            max(path.stat().st_mtime_ns for path in views.glob(pattern)) for pattern in ("present-*.json", "0*.json")
        )
        if entered > decided:
            return
        time.sleep(0.1)
    raise AssertionError(f"no new rank came within {PATIENCE_SECONDS} s")
