"""A task whose processes write down each optimizer step that they take, for `random_faults`.

The model is linear, so its loss is convex: what the order of sums changes in one step does not grow in later ones.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ddp_trainer.tasks.digits import CLASSES, SIDE, Digits

HISTORY = "LIVE_HISTORY"
"""Environment variable: the folder for the histories, one file a process. Each line: time, step, ranks, weights."""


class Recorded(Digits):
    """Digits with steps of at least `seconds`."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self._seconds = seconds
        if folder := os.environ.get(HISTORY):
            history = (Path(folder) / f"{os.environ['DDPJOB_NODE_RANK']}-{uuid.uuid4().hex}").open("w", buffering=1)
            register_optimizer_step_post_hook(lambda optimizer, _args, _options: _record(history, optimizer))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled() and self._seconds:
            time.sleep(self._seconds)
        return super().loss(output, batch)


def _record(history: Any, optimizer: Optimizer) -> None:
    weights = [value for group in optimizer.param_groups for value in group["params"]]
    step = int(optimizer.state[weights[0]]["step"])
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in weights)).hexdigest()[:16]
    history.write(f"{time.time():.6f} {step} {dist.get_world_size() if dist.is_initialized() else 1} {digest}\n")
