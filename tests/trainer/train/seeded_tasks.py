"""Tasks with a fault built in, named by tests as `--task seeded_tasks:Name`: a user's own task, from a user's
own module.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.tasks import Task
from ddp_trainer.tasks.digits import Digits
from ddp_trainer.tasks.toy_linear import ToyLinear

RANK = int(os.environ.get("RANK", "0"))


class Struck(Digits):
    """Digits whose process gets a signal at an exact moment: rank `rank`, at its `call`-th loss of training
    or validation.

    Only in attempt 0, before torchrun has restarted it. A signal in a loss comes in the middle of a step, between
    forward and backward.
    """

    def __init__(self, signal_name: str = "SIGKILL", rank: int = 1, call: int = 0, evaluating: bool = False) -> None:
        super().__init__(width=8)
        self._signal = signal.Signals[signal_name] if signal_name != "none" else None
        first = os.environ["DDPJOB_ATTEMPT"] == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self._call = call if rank == RANK and first else 0
        self._evaluating = evaluating
        self._calls = 0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled() != self._evaluating:
            self._calls += 1
            if self._calls == self._call:
                if self._signal is None:
                    raise ValueError("a sample that cannot be trained on (seeded)")
                os.kill(os.getpid(), self._signal)
        return super().loss(output, batch)


class Unstable(ToyLinear):
    """64 samples, and a loss that is NaN for a batch that begins with a certain one: the first of batch `step` of the
    first epoch, unless it is 0. With `gradient`, the gradient is NaN and the loss is not; with `heals`, the gradient is
    finite and the next loss as well.
    """

    def __init__(self, step: int, gradient: bool = False, heals: bool = False, validates: bool = False) -> None:
        super().__init__(samples=64)
        order = BatchPlan(samples=64, global_batch=4).order(0)
        self._bad = super().train_dataset().tensors[0][order[4 * (step - 1)]] if step else None
        self._gradient = gradient
        self._heals = heals
        self._validates = validates

    def eval_dataset(self) -> Dataset[Any] | None:
        return self.train_dataset() if self._validates else None

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(output, batch)
        if self._bad is None or not torch.equal(batch[0][0], self._bad):
            return loss
        if self._gradient:
            output.register_hook(lambda gradient: gradient * torch.nan)
            return loss
        return loss + torch.nan if self._heals else loss * torch.nan


class Hungry(Digits):
    """Digits that run out of memory on rank 1 with more than `limit` samples at once, in the forward or the
    backward pass or in validation, from the `first`-th such loss on, in every attempt or (not `always`) in attempt 0.
    """

    def __init__(self, limit: int = 8, where: str = "forward", first: int = 1, always: bool = True) -> None:
        super().__init__(width=8, dropout=0.0)
        self._limit = limit if RANK == 1 and (always or os.environ["DDPJOB_ATTEMPT"] == "0") else 10**9
        self._where = where
        self._first = first
        self._calls = 0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        is_there = torch.is_grad_enabled() != (self._where == "validation")
        self._calls += is_there
        if is_there and len(output) > self._limit and self._calls >= self._first:
            if self._where != "backward":
                no_memory()
            output.register_hook(no_memory)
        return super().loss(output, batch)


class HungryStage(Digits):
    """Digits whose second pipeline stage has memory for `limit` samples at once, in its forward pass."""

    def __init__(self, limit: int = 4) -> None:
        super().__init__(width=8, dropout=0.0)
        self._limit = limit

    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        stage = super().stage(model, index, count)
        if index == 1:
            stage.register_forward_pre_hook(self._check)
        return stage

    def _check(self, stage: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and len(inputs[0]) > self._limit:
            no_memory()


def no_memory(gradient: Tensor | None = None) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (seeded)")


class Overflowing(Digits):
    """Digits whose loss, in attempt 0, is a million times as large in a few batches: more than fp16 can hold."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self._calls = 0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._calls += torch.is_grad_enabled()
        overflows = 4 <= self._calls <= 6 and os.environ["DDPJOB_ATTEMPT"] == "0"
        return super().loss(output, batch) * (1e6 if overflows else 1.0)


class Normalised(Digits):
    """Digits with batch normalisation, whose statistics are state too."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


class Noisy(Digits):
    """Digits with noise on the images and on the loss, from all generators that a script may draw from."""

    def __init__(self) -> None:
        super().__init__(width=8)

    def train_dataset(self) -> Dataset[Any]:
        return NoisySamples(super().train_dataset())

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        noise = 1.0 + 0.1 * (np.random.rand() + random.random()) if torch.is_grad_enabled() else 1.0
        return super().loss(output, batch) * noise


class NoisySamples(Dataset[Any]):
    """Samples with an augmentation from each generator."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        image, label = self._samples[index]
        return image * (1.0 + 0.1 * random.random()) + 0.1 * float(np.random.rand()) * torch.rand(()), label


class Sample(NamedTuple):
    image: Tensor
    label: Tensor


class Named(Digits):
    """Digits whose samples, and so the batches of them, are named tuples."""

    def __init__(self) -> None:
        super().__init__(width=8)

    def train_dataset(self) -> Dataset[Any]:
        return NamedSamples(super().train_dataset())

    def eval_dataset(self) -> Dataset[Any]:
        return NamedSamples(super().eval_dataset())

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, (batch.image, batch.label))


class NamedSamples(Dataset[Any]):
    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return Sample(*self._samples[index])


class HalfUsed(Digits):
    """Digits whose model has one layer that no sample uses, and one that only even-numbered ranks use."""

    def model(self) -> nn.Module:
        return HalfUsedModel()


class HalfUsedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 10)
        self.sometimes = nn.Linear(64, 10)
        self.unused = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return self.used(flat) + self.sometimes(flat) if RANK % 2 == 0 else self.used(flat)


class Seven(Task):
    """Seven samples, so that no number of ranks but one and seven divides them; sample i is i."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(7.0).unsqueeze(1))

    def eval_dataset(self) -> Dataset[Any]:
        return self.train_dataset()

    def loss(self, output: Tensor, batch: tuple[Tensor]) -> Tensor:
        return output.square().mean()

    def score(self, output: Tensor, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        return (batch[0] % 2 == 0).sum(), len(batch[0])


class HeldOut(Seven):
    """Seven samples to train on, and none to validate on (`empty`) or so many as nobody knows."""

    def __init__(self, empty: bool) -> None:
        self._empty = empty

    def eval_dataset(self) -> Any:
        return TensorDataset(torch.zeros(0, 1)) if self._empty else iter([(torch.zeros(1),)])


class Drawn(Seven):
    """Three samples to validate on, which it draws."""

    seen: ClassVar[list[list[float]]] = []

    def eval_dataset(self) -> Dataset[Any]:
        samples = torch.rand(3, 1) + random.random()
        self.seen.append(samples.flatten().tolist())
        return TensorDataset(samples)
