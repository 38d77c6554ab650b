"""A task that takes its time, so that a test has some: `--task paced_tasks:Paced`."""

from __future__ import annotations

import os
import time

from torch import Tensor

from ddp_trainer.tasks.digits import Digits


class Paced(Digits):
    """Digits whose loss takes `seconds` longer in every attempt before `last`."""

    def __init__(self, seconds: float = 0.2, last: int = 2) -> None:
        super().__init__(width=8)
        self._seconds = seconds if int(os.environ["DDPJOB_ATTEMPT"]) < last else 0.0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(self._seconds)
        return super().loss(output, batch)
