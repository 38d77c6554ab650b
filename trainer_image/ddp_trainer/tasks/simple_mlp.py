"""A 784-256-10 perceptron on the digits, enlarged to 28 x 28 pixels: the shape that MNIST examples use,
without a download.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ddp_trainer.tasks import check_counts
from ddp_trainer.tasks.digits import CLASSES, Digits

SIDE = 28


class SimpleModel(nn.Module):
    """Two linear layers: [B, input_size] to [B, num_classes]."""

    def __init__(self, input_size: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.relu(self.fc1(x)))
        return logits


class SimpleMLP(Digits):
    """Option: `hidden`, the width of the middle layer."""

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        check_counts("simple_mlp", {"hidden": hidden})
        self.hidden = hidden

    def model(self) -> nn.Module:
        return SimpleModel(SIDE * SIDE, self.hidden, CLASSES)

    def _split(self, *, held_out: bool) -> Dataset[Any]:
        images, labels = super()._split(held_out=held_out)[:]
        enlarged = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        return TensorDataset(enlarged.flatten(1), labels)
