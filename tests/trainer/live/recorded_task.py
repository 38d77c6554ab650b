"""A task whose processes write down what they train on and each optimizer step that they take, for `random_faults`.

The model is linear, so its loss is convex: what the order of sums changes in one step does not grow in later ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import Dataset, TensorDataset

from ddp_trainer.client.recovery import Recovery
from ddp_trainer.tasks.digits import CLASSES, SIDE, Digits

HISTORY = "LIVE_HISTORY"
"""Environment variable: the folder for the histories, one file a process. A line is {"view", "step", "samples"} before
a part of a gradient is computed, whose step may be dropped, and {"view", "step", "time", "ranks", "lr", "weights"}
after an optimizer step.
"""


class Recorded(Digits):
    """Digits with steps of at least `seconds`."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self._seconds = seconds
        self._history: Any = None
        self._view, self._step = 0, 1
        if folder := os.environ.get(HISTORY):
            path = Path(folder) / f"{os.environ['DDPJOB_NODE_RANK']}-{uuid.uuid4().hex}"
            self._history = path.open("w", buffering=1)
            register_optimizer_step_post_hook(lambda optimizer, _args, _options: self._stepped(optimizer))
            begin_step = Recovery.begin_step

            def begins(recovery: Recovery, generators: Tensor | None = None) -> None:
                assert recovery.membership.view is not None
                self._view, self._step = recovery.membership.view.number, recovery.position.steps + 1
                begin_step(recovery, generators)

            Recovery.begin_step = begins  # type: ignore[method-assign]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))

    def train_dataset(self) -> Dataset[Any]:
        """Images, labels, and the number of each sample."""
        images, labels = super().train_dataset().tensors  # type: ignore[attr-defined]
        return TensorDataset(images, labels, torch.arange(len(labels)))

    def loss(self, output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self._seconds)
            if self._history is not None:
                self._write(view=self._view, step=self._step, samples=batch[2].tolist())
        return super().loss(output, (batch[0], batch[1]))

    def _stepped(self, optimizer: Optimizer) -> None:
        weights = [value for group in optimizer.param_groups for value in group["params"]]
        self._write(
            view=self._view,
            step=self._step,
            time=time.time(),
            ranks=dist.get_world_size() if dist.is_initialized() else 1,
            lr=float(optimizer.param_groups[0]["lr"]),
            weights=digest(weights),
        )
        self._step += 1

    def _write(self, **line: Any) -> None:
        self._history.write(json.dumps(line) + "\n")


def digest(weights: Iterable[Tensor]) -> str:
    """Of these bytes."""
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in weights)).hexdigest()[:16]
