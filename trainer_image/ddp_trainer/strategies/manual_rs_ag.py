"""A ring all-reduce taken apart: a reduce-scatter, after which each rank has one part of the sum, then an
all-gather.

Between the two each rank could update its part alone, which is what sharded optimizers (ZeRO, FSDP) build on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.strategies.manual import ManualReduction


class ManualReduceScatterAllGather(ManualReduction):
    """All gradients of one type in one flat tensor, padded so that the ranks share it evenly."""

    name = "manual_rs_ag"

    def reduce_gradients(self) -> None:
        if self.world.size == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self.shared_gradients():
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_type.values():
            self._reduce(gradients)

    def _reduce(self, gradients: list[Tensor]) -> None:
        numbers = sum(gradient.numel() for gradient in gradients)
        padding = gradients[0].new_zeros(-numbers % self.world.size)
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), padding])
        part = flat.new_empty(flat.numel() // self.world.size)
        dist.reduce_scatter_tensor(part, flat)
        dist.all_gather_into_tensor(flat, part)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
