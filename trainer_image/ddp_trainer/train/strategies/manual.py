"""What the strategies that reduce gradients by hand have in common: equal ranks, and knowing which gradients
there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def forward_backward(self, batch: StepBatch) -> Tensor:
        # Running statistics are rank 0's, as under DDP: they are what the snapshot holds.
        if self.world.size > 1:
            for buffer in self._persistent_buffers():
                dist.broadcast(buffer, src=0)
        return super().forward_backward(batch)

    def shared_gradients(self) -> list[Tensor]:
        """The gradients to reduce, of the same parameters on every rank.

        A parameter that some rank used has one everywhere, of zeros where it was not used. One that no rank
        used keeps none, or an optimizer with weight decay or momentum would change it all the same.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device="cpu")
        used = used.to(self.world.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        gradients = []
        for parameter, somewhere in zip(parameters, used.tolist(), strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def _persistent_buffers(self) -> Iterator[Tensor]:
        kept = self.model.state_dict()
        return (buffer for name, buffer in self.model.named_buffers() if name in kept)


class ManualAllReduce(ManualReduction):
    """One all-reduce a parameter, all of them under way at once."""

    name = "manual_allreduce"

    def reduce_gradients(self) -> None:
        if self.world.size == 1:
            return
        works = [dist.all_reduce(gradient, async_op=True) for gradient in self.shared_gradients()]
        for work in works:
            work.wait()


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
