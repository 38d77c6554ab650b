"""DDP's arithmetic in plain sight: after the backward pass, one all-reduce for each gradient.

Slower than DDP, which puts many gradients into a bucket and reduces it while the backward pass still runs.
"""

from __future__ import annotations

import torch.distributed as dist

from ddp_trainer.strategies.manual import ManualReduction


class ManualAllReduce(ManualReduction):
    """One all-reduce a parameter, all of them under way at once."""

    name = "manual_allreduce"

    def reduce_gradients(self) -> None:
        if self.world.size == 1:
            return
        works = [dist.all_reduce(gradient, async_op=True) for gradient in self.shared_gradients()]
        for work in works:
            work.wait()
