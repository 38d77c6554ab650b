"""How the samples of a run come to its ranks: a seeded order an epoch, cut into global batches, shared out.

Nothing here depends on what a rank did before: a step and the number of ranks say which samples each takes. Every
sample comes once an epoch, and nothing is padded with repeats.

    order (epoch)   one permutation of all samples, from the seed and the epoch
    global batch    the next `global_batch` of them; the last of an epoch may be smaller, or is dropped
    share           the contiguous part of it of one rank; shares differ by at most one sample
    micro-batch     what a rank takes through the model at once; equally many on each, weighted with their count
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.contract.exit_codes import UserError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one epoch of `samples` is cut into global batches."""

    samples: int
    global_batch: int
    seed: int = 0
    keep_last: bool = True
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise UserError(
                f"--global-batch {self.global_batch} is more than the {self.samples} samples there are, and "
                "--last-batch drop leaves out what does not fill a batch: nothing would be trained on; lower "
                "--global-batch or choose --last-batch keep"
            )

    @property
    def steps_per_epoch(self) -> int:
        if self.keep_last:
            return -(-self.samples // self.global_batch)
        return self.samples // self.global_batch

    @property
    def samples_per_epoch(self) -> int:
        """How many samples an epoch trains on: all, unless its last batch is dropped."""
        return min(self.samples, self.steps_per_epoch * self.global_batch)

    def order(self, epoch: int) -> Tensor:
        """The samples of an epoch in the order they are trained on, [samples_per_epoch] of int64."""
        if not self.shuffle:
            return torch.arange(self.samples_per_epoch, device="cpu")
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        return torch.randperm(self.samples, generator=generator, device="cpu")[: self.samples_per_epoch]

    def samples_of(self, steps: int) -> int:
        """How many samples the first steps of a run are on."""
        epoch, number = divmod(steps, self.steps_per_epoch)
        return epoch * self.samples_per_epoch + number * self.global_batch

    def batches(self, epoch: int, offset: int = 0) -> Iterator[Tensor]:
        """The global batches of an epoch that come after its first `offset` samples."""
        order = self.order(epoch) if self.shuffle else None
        for start in range(offset, self.samples_per_epoch, self.global_batch):
            end = min(start + self.global_batch, self.samples_per_epoch)
            yield torch.arange(start, end, device="cpu") if order is None else order[start:end]


def share(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """The rank's contiguous part of a global batch. The parts cover it once; their sizes differ by at most
    one.
    """
    return torch.tensor_split(batch, world_size)[rank]


def micro_batches(batch: Tensor, rank: int, world_size: int, micro_batch: int | None) -> list[tuple[Tensor, int]]:
    """The rank's share, cut into as many micro-batches as every other rank has, each with its count.

    The number follows from the largest share, because sharded strategies meet in every forward pass. A rank
    whose share is too small for that repeats the batch's first sample with a count of 0: it takes part, and
    adds nothing.
    """
    largest = -(-len(batch) // world_size)
    number = -(-largest // micro_batch) if micro_batch else 1
    cuts = torch.tensor_split(share(batch, rank, world_size), number)
    return [(cut, len(cut)) if len(cut) else (batch[:1], 0) for cut in cuts]


def mixed_seed(*parts: int) -> int:
    """One 32-bit seed of several numbers, such as (seed, epoch), that meets no other's.

    torch's generator on the CPU looks at the lower 32 bits of its seed only, so neither sums nor shifts would
    do.
    """
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
