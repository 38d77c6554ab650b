"""nn.DataParallel: one process that copies the model to all its GPUs in every step and splits each batch
among them.

The simplest way to use several GPUs of one node, and the slowest: one Python interpreter drives all of them.
`ddp` with one process a GPU does the same faster.
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

import torch
from torch import nn

from ddp_trainer.strategies.base import Strategy


class DataParallel(Strategy):
    """One rank, all GPUs that it sees. What it needs is checked in `config.check_world`."""

    name = "data_parallel"

    def wrap(self, model: nn.Module) -> None:
        super().wrap(model)
        self.module = nn.DataParallel(self.model, device_ids=list(range(torch.cuda.device_count())))
