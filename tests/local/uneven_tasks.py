"""A task of which one rank is slow, for `--task uneven_tasks:Uneven`."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.tasks.digits import Digits

SECONDS = 0.1


class Uneven(Digits):
    """Digits whose rank 1 takes a while longer in each step: for its `data`, or in its `passes`."""

    def __init__(self, of: str) -> None:
        super().__init__(width=8)
        self._slow = of if os.environ["RANK"] == "1" else ""

    def train_dataset(self) -> Dataset[Any]:
        return Late(super().train_dataset()) if self._slow == "data" else super().train_dataset()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self._slow == "passes":
            time.sleep(SECONDS)
        return super().loss(output, batch)


class Late(Dataset[Any]):
    """The samples of a step, a while after they are asked for."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(SECONDS)
        return [self._samples[index] for index in indices]
