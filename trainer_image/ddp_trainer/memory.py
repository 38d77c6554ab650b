"""Running out of memory on one rank: all ranks take smaller micro-batches together, and the global batch
stays.

A rank that catches the error and goes on alone leaves the others in a collective for ever. So the size is
found before the first step, in rehearsals that need no other rank and are voted on; only from then on do
gradients travel while the backward pass still runs. A rank whose memory fails later can only end the attempt:
it leaves a note on the volume, and the next attempt starts with half.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_trainer.distributed import World
from ddp_trainer.json_files import read_json, write_json


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host's allocator, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def out_of_memory(rank: int, step: int, size: int, cause: object) -> torch.OutOfMemoryError:
    """The error that says what to do about it. `step` is the one under way, `size` the samples of its
    micro-batches.
    """
    if size > 1:
        then = f"the next attempt starts with micro-batches of {size // 2}"
    else:
        then = "there is no smaller one: use --precision bf16, a smaller model, or --strategy fsdp on more ranks"
    return torch.OutOfMemoryError(
        f"rank {rank} ran out of memory in step {step} with micro-batches of {size} samples; {then} ({cause})"
    )


@dataclass(frozen=True, slots=True)
class MicroBatchNote:
    """The largest micro-batch that a life of this job may still try, kept beside its logs."""

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
