"""Digits with steps of 50 ms that leave the processor free, as where a device computes, and in turns."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from tests.benchmarks.turns import Turns
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.tasks.digits import Digits

SECONDS: Final = 0.05


class Paced(Digits):
    """A small model: what surrounds a step is what it costs."""

    def __init__(self) -> None:
        super().__init__(width=8, dropout=0.0)

    def train_dataset(self) -> Dataset[Any]:
        return InTurns(super().train_dataset(), "product")

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(SECONDS)
        return super().loss(output, batch)


class InTurns(Dataset[Any]):
    """`inner`, which is asked for all samples of a step at once."""

    def __init__(self, inner: Any, player: str) -> None:
        self._inner, self._player = inner, player
        self._turns: Turns | None = None

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        return self._inner[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._turns is None:
            self._turns = Turns(self._player)
        self._turns.step()
        return [self._inner[index] for index in indices]
