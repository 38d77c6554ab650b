"""Two classes drawn at random, 2,048 samples of 20 numbers, and a linear model: the smallest thing that
trains.

The labels do not depend on the inputs, so there is nothing to learn and the loss stays near ln 2; what it
shows is the plumbing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ddp_trainer.tasks import Task, check_counts

SEED = 1234
FEATURES = 20


class ToyLinear(Task):
    """Option: `samples`. Seeded, so that every rank draws the same data set."""

    def __init__(self, samples: int = 2048) -> None:
        check_counts("toy_linear", {"samples": samples})
        self.samples = samples

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(SEED)
        inputs = torch.rand(self.samples, FEATURES, generator=generator)
        return TensorDataset(inputs, torch.randint(0, 2, (self.samples,), generator=generator))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        # squeeze(-1), not squeeze(): a batch of one sample must keep its dimension.
        return F.binary_cross_entropy_with_logits(output.squeeze(-1), batch[1].to(output.dtype))

    def score(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return ((output.squeeze(-1) > 0) == batch[1].bool()).sum(), len(batch[1])
