"""nn.DataParallel: one process that copies the model to all its GPUs in every step and splits each batch
among them.

The simplest way to use several GPUs of one node, and the slowest: one Python interpreter drives all of them.
`ddp` with one process a GPU does the same faster. A snapshot holds the generator of the first GPU only, so where
the model draws (dropout), a resumed run repeats the unbroken one's losses closely, not to the bit.
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_trainer.train.precision import Precision
from ddp_trainer.train.strategies.base import Strategy


class DataParallel(Strategy):
    """One rank, all GPUs that it sees. What it needs is checked by `config.check_world`."""

    name = "data_parallel"

    def wrap(self, model: nn.Module) -> None:
        super().wrap(model)
        copied = Autocast(self.model, self.precision)
        self.module = nn.DataParallel(copied, device_ids=list(range(torch.cuda.device_count())))

    @property
    def local_module(self) -> nn.Module:
        # All GPUs are this rank's own, and the first has no memory for what is meant for all of them.
        return self.module


class Autocast(nn.Module):
    """The model under autocast in whichever thread calls it.

    DataParallel calls each copy in a thread, where autocast goes on but has forgotten its type: it would be fp16.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self._precision = precision

    def forward(self, *inputs: Any) -> Any:
        with self._precision.autocast():
            return self.model(*inputs)
