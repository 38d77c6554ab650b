"""Tasks that only a proof needs, chosen as a user's own would be: `--task proof_tasks:Name`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.tasks.tiny_lm import Sequences, TinyLM

PUBLISHED_SEED = 42
PUBLISHED_BATCH = 128


class Published(TinyLM):
    """TinyLM on random tokens with the initial weights and the order of samples of the published run.

    That run seeds torch with 42 before it builds the model, and takes the samples as they come: 32 of every rank, of
    which rank r has each fourth from r on. The trainer always shuffles, so the samples are laid out here such that its
    order, for `--seed 42 --global-batch 128`, is theirs.
    """

    def __init__(self) -> None:
        super().__init__(tokens="random")

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(PUBLISHED_SEED)
            return super().model()

    def train_dataset(self) -> Dataset[Any]:
        tokens = super().train_dataset()[torch.arange(self.samples)]
        shuffled = BatchPlan(samples=self.samples, global_batch=PUBLISHED_BATCH, seed=PUBLISHED_SEED).order(0)
        laid_out = torch.empty_like(tokens)
        laid_out[shuffled] = tokens
        return Sequences(laid_out)


class Numbered(TinyLM):
    """A small TinyLM on random tokens whose batches end with the numbers of their samples, for `watched.py` to note."""

    def __init__(self, samples: int) -> None:
        super().__init__(tokens="random", samples=samples, d_model=64, n_layers=2, d_ff=128)

    def train_dataset(self) -> Dataset[Any]:
        return self._numbered(super().train_dataset())

    def eval_dataset(self) -> Dataset[Any]:
        return self._numbered(super().eval_dataset())

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch[0])

    def score(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return super().score(output, batch[0])

    def _numbered(self, dataset: Any) -> Dataset[Any]:
        return TensorDataset(dataset.tokens, torch.arange(len(dataset)))
