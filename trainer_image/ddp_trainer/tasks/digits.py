"""Handwritten digits: scikit-learn's 1,797 real 8 x 8 images, every fifth held out. The demo's task.

Small enough for a laptop's CPU, real enough that a held-out accuracy below 0.95 means that training is
broken. The images are the test set of https://archive.ics.uci.edu/dataset/80 and ship inside scikit-learn, so
no run downloads anything.
"""

from __future__ import annotations

import gzip
import importlib.util
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.tasks import Task, check_counts, check_share

HELD_OUT_EVERY = 5
SIDE = 8
CLASSES = 10


class Digits(Task):
    """Options: `width`, channels of the first convolution; `dropout`, the share of features dropped in
    training.
    """

    def __init__(self, width: int = 32, dropout: float = 0.2) -> None:
        check_counts("digits", {"width": width})
        check_share("digits", "dropout", dropout)
        self.width = width
        self.dropout = dropout

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * self.width * (SIDE // 2) ** 2, 128),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(128, CLASSES),
        )

    def train_dataset(self) -> Dataset[Any]:
        return self._split(held_out=False)

    def eval_dataset(self) -> Dataset[Any]:
        return self._split(held_out=True)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def score(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (output.argmax(dim=-1) == batch[1]).sum(), len(batch[1])

    def _split(self, *, held_out: bool) -> Dataset[Any]:
        images, labels = self._images
        chosen = (torch.arange(len(labels)) % HELD_OUT_EVERY == 0) == held_out
        return TensorDataset(images[chosen], labels[chosen])

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        """[1797, 1, 8, 8] in 0..1, and [1797] in 0..9."""
        with gzip.open(_digits_file(), "rt") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
        images = torch.from_numpy(table[:, :-1]).reshape(-1, 1, SIDE, SIDE) / 16.0
        return images, torch.from_numpy(table[:, -1]).long()


def _digits_file() -> Path:
    """The file that `sklearn.datasets.load_digits` reads. Importing scikit-learn for it would cost a second a
    start.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise UserError(
        "task 'digits' reads its images from scikit-learn, which is not installed here: pip install scikit-learn"
    )
