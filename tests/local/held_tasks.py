"""Digits that stand still until the test lets them go on, for `--task held_tasks:Held`: the run is then where the test
looks for it, however slow the test is and however fast the machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from ddp_trainer.tasks.digits import Digits

PATIENCE_SECONDS = 180.0


class Held(Digits):
    """In each attempt the last rank makes `at` steps, and the next one only once `go-ATTEMPT` is in the shared folder.
    The others wait for it in their collective. What is trained is what Digits train.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self._steps_left = at if is_last else -1

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            if self._steps_left == 0:
                _await_leave()
            self._steps_left -= 1
        return super().loss(output, batch)


def _await_leave() -> None:
    go = Path(os.environ["DDPJOB_SHARED"], f"go-{os.environ['DDPJOB_ATTEMPT']}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not go.exists():
        assert time.monotonic() < deadline, f"no {go.name} within {PATIENCE_SECONDS} s"
        time.sleep(0.02)
