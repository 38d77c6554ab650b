"""What the strategies that reduce gradients by hand have in common: equal ranks, and knowing which gradients
there are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_trainer.client.gradients import from_first, shared_gradients, sum_gradients
from ddp_trainer.rank.collectives import all_gather_single, reduce_scatter_single
from ddp_trainer.train.data import StepBatch
from ddp_trainer.train.strategies.base import Strategy


class ManualReduction(Strategy):
    """Every rank holds the whole model; after the last backward pass `reduce_gradients` sums the gradients
    up.
    """

    def wrap(self, model: nn.Module) -> None:
        """Start from rank 0's weights, whatever the other ranks have drawn."""
        super().wrap(model)
        if dist.is_initialized():  # with live recovery it is not yet
            from_first(self.model.state_dict().values())

    def forward_backward(self, batch: StepBatch) -> Tensor:
        self.share_statistics()
        return super().forward_backward(batch)

    def shared_gradients(self) -> list[Tensor]:
        """The gradients to reduce, of the same parameters on every rank."""
        return shared_gradients(self.model.parameters(), self.world.device)


class ManualAllReduce(ManualReduction):
    """One all-reduce a parameter, all of them under way at once."""

    name = "manual_allreduce"

    def reduce_gradients(self) -> None:
        if self.world.size == 1:
            return
        sum_gradients(self.shared_gradients())


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
        reduce_scatter_single(part, flat)
        all_gather_single(flat, part)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
