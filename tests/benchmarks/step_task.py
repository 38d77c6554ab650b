"""The product's task for bench_step: tiny_lm, whose data set is asked for samples once a step and takes turns there."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.turns import Turns
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.tasks.tiny_lm import Sequences, TinyLM


class TinyLMInTurns(TinyLM):
    """tiny_lm as it ships, but for the turns."""

    def train_dataset(self) -> Dataset[Any]:
        return SequencesInTurns(self._split[0])


class SequencesInTurns(Sequences):
    """Asked for all samples of a step at once; gives each as Sequences does."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__(tokens)
        self._turns: Turns | None = None

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self._turns is None:
            self._turns = Turns("product")
        self._turns.step()
        return [self[index] for index in indices]
