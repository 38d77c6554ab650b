"""Running out of memory on one rank: all ranks take smaller micro-batches together, and the global batch
stays.

A rank that catches the error and goes on alone leaves the others in a collective for ever. So the size is
found before the first step, by probes that need no other rank and whose results are reduced; only from then on do
gradients travel while the backward pass still runs. A rank whose memory fails where others wait for it, in a
strategy that cannot probe or later, can only end the attempt: it leaves a note on the volume, and the next
attempt starts with half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ddp_trainer.client.gradients import Wait, started
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.contract.outcomes import classify
from ddp_trainer.rank.step_reduce import on_any_rank
from ddp_trainer.rank.world import World
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import StepBatch, number_of_cuts, recut

_NO_LIMIT: Final = 1 << 62


class MicroBatches:
    """How many samples a rank takes at once, the same on all ranks; `limit` is the most that it may try, None for any.

    `ranks` is how many share a batch; `on_lowered` is called with each new limit.
    """

    def __init__(self, world: World, ranks: int, note: MicroBatchNote, *, limit: int | None) -> None:
        self.limit = limit
        self.on_lowered: Callable[[int], None] = lambda limit: None
        self._world = world
        self._ranks = ranks
        self._note = note

    def regroup(self, ranks: int) -> None:
        """From here on so many ranks share a batch."""
        self._ranks = ranks

    def agree(self, wait: Wait) -> None:
        """With live recovery, in each new group: the least limit that a rank knows is that of all.

        Each has read the note when it began, and one in place of a rank that ran out of memory has found a lower one.
        """
        own = _NO_LIMIT if self.limit is None else self.limit
        least = torch.tensor([own], device="cpu")
        if self._world.size > 1:
            wait(started(dist.all_reduce(least, op=dist.ReduceOp.MIN, async_op=True)))
        if int(least) < own:
            self.limit = int(least)
            self.on_lowered(self.limit)

    def size(self, batch: StepBatch) -> int:
        """Samples of the largest micro-batch on any rank."""
        return self._size(batch, len(batch.micro_batches))

    def _size(self, batch: StepBatch, number: int) -> int:
        return -(-batch.total // (self._ranks * number))

    def cut(self, batch: StepBatch) -> StepBatch:
        """The batch in micro-batches that are within the limit."""
        return batch if self.limit is None else recut(batch, self._ranks, self.limit)

    def fit(self, batch: StepBatch, probe_memory: Callable[[StepBatch], bool], *, step: int) -> StepBatch:
        """Find a micro-batch that every rank has the memory for, as `probe_memory` tells of this one.

        Raises OutOfMemoryError when one sample is too many.
        """
        number = len(batch.micro_batches)  # the same on all ranks, which may cut anew into other numbers
        while True:
            fits = probe_memory(batch)
            (lacking,) = on_any_rank(self._world, not fits)
            if not lacking:
                return batch
            size = self._size(batch, number)
            if size == 1:
                cause = "this rank" if not fits else "another rank"
                raise out_of_memory(self._world.rank, f"step {step}", size, f"it was {cause} that had too little")
            self.limit = size // 2
            number = max(number, number_of_cuts(batch.total, self._ranks, self.limit))
            self.on_lowered(self.limit)
            batch = self.cut(batch)

    @contextlib.contextmanager
    def noted(self, where: str, size: int) -> Iterator[None]:
        """Around what takes `size` samples at once and cannot be tried again: leaves the note if memory fails.

        `where` is how a person would call it. Raises OutOfMemoryError with advice.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._note.lower(size // 2)
            raise out_of_memory(self._world.rank, where, size, error) from error


def starting_micro_batch(
    config: TrainConfig, world: World, limit: int | None, *, live_ranks: int | None = None
) -> int | None:
    """Samples of a micro-batch at most, before any is tried: as asked, but within what an earlier attempt left memory
    for. A pipeline, whose schedule is made for one number of them, gets four a stage, which keep it full for most of
    the time. With live recovery of `live_ranks`, it is the share that each has while none is lost: those that are left
    then take more micro-batches, of that size, which each is known to have the memory for.
    """
    asked = config.micro_batch
    if asked is None and live_ranks is not None:
        asked = -(-config.global_batch // live_ranks)
    if asked is None and config.strategy == "pipeline":
        asked = max(1, config.global_batch // (4 * world.size))
    return asked if limit is None else min(asked or limit, limit)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host's allocator, had no memory left: what the launcher calls so, causes included."""
    return classify(error)[1] == "OutOfMemory"


def needs_backward(error: BaseException) -> bool:
    """Whether a pass failed because the model recomputes activations in a nested backward pass, as torch's `checkpoint`
    does with use_reentrant=True: `torch.autograd.grad` may not start one, and `backward()` may.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and "checkpoint" in text.lower() and ".grad()" in text


def out_of_memory(rank: int, where: str, size: int, cause: object) -> torch.OutOfMemoryError:
    """The error that says what to do about it; `size` is the samples of a micro-batch there."""
    if size > 1:
        then = f"the next attempt starts with micro-batches of {size // 2}"
    else:
        then = "there is no smaller one: use --precision bf16, a smaller model, or --strategy fsdp on more ranks"
    return torch.OutOfMemoryError(
        f"rank {rank} ran out of memory in {where} with micro-batches of {size} samples; {then} ({cause})"
    )


@dataclass(frozen=True, slots=True)
class MicroBatchNote:
    """The largest micro-batch that an attempt of this job may still try, kept beside its logs."""

    path: Path
    uid: str

    def lower(self, size: int) -> None:
        """Leave it for the next attempt. A volume that refuses costs that attempt another failure, no more."""
        with contextlib.suppress(OSError):
            write_json(self.path, {"version": 1, "uid": self.uid, "microBatch": max(1, size)})

    def read(self) -> int | None:
        """What an earlier attempt of this very job left; None where there is nothing."""
        note = read_json(self.path)
        if note is None or note.get("uid") != self.uid or not isinstance(note.get("microBatch"), int):
            return None
        return int(note["microBatch"])


def from_first_rank(world: World, size: int | None) -> int | None:
    """Rank 0's value on every rank: a volume that ranks see differently must not make them cut differently."""
    value = torch.tensor([size or 0], device=world.device)
    if world.size > 1:
        dist.broadcast(value, src=0)
    return int(value.item()) or None
