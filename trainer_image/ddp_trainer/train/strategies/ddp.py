"""DistributedDataParallel: every rank holds the whole model, and gradients are averaged while the backward
pass still runs.

https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.train.data import StepBatch
from ddp_trainer.train.strategies.base import Strategy


class DDP(Strategy):
    """DDP over gloo or NCCL, with gradient accumulation that meets the other ranks once a step."""

    name = "ddp"
    preallocates_grads = True
    module: DistributedDataParallel

    def wrap(self, model: nn.Module) -> None:
        if self.config.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        super().wrap(model)
        if dist.is_initialized():  # with live recovery it is not yet
            self._distribute(init_sync=True)

    def regroup(self) -> None:
        """Build DDP anew. The caller makes the weights equal."""
        self._distribute(init_sync=False)

    def _distribute(self, *, init_sync: bool) -> None:
        self.module = DistributedDataParallel(
            self.model,
            init_sync=init_sync,
            device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
            # Gradients live in the buckets that are reduced: no copy, and half the memory for them.
            gradient_as_bucket_view=True,
            static_graph=self.config.static_graph,
            find_unused_parameters=self.config.find_unused_parameters,
        )

    def warm_up(self, batch: StepBatch) -> None:
        """Let DDP pack its buckets anew before the first step instead of after it.

        DDP orders its buckets by what the first backward pass shows. From three ranks on, the rounding of a
        ring all-reduce depends on where in a bucket a number stands, so the first step after a resume would
        differ from the unbroken run's in the last bit. A backward pass whose gradient is thrown away brings
        both to the same layout; with two ranks a + b = b + a, and none is needed.

        A static graph is learnt in the first backward pass, which must meet the other ranks: DDP fails with an
        internal assertion where that is the first micro-batch of several, under `no_sync`.
        """
        if self.world.size < 3 and not self.config.static_graph:
            return
        with self._undone():
            for _ in range(2):
                # The layout changes when the second forward pass begins.
                self.micro_step(batch.micro_batches[0], batch.total)

    @property
    def gradient_scale(self) -> float:
        # DDP divides by the number of ranks, but the parts of a mean are to be summed.
        return float(self.world.size)

    def accumulation(self, *, final: bool) -> AbstractContextManager[Any]:
        return nullcontext() if final else self.module.no_sync()
