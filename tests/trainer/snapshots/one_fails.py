"""Rank 1 of two fails and ends, while rank 0 is not yet at the end of the step before, from which it saves.

Run as `RANK=… one_fails.py OUT`, without torchrun, which would end rank 0.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from two_ranks import RANK, Run

from ddp_trainer.snapshots.session import Progress


class Late(Run):
    """Rank 0 comes to the end of step 2 only after rank 1 has failed in step 3, and has had a second to end."""

    def __init__(self, out: Path) -> None:
        super().__init__(out / "digits", every="100steps")
        self._failed = out / "failed"
        end_step = self.snapshots.step_end

        def late(progress: Progress) -> None:
            if RANK == 0 and progress.step == 2:
                while not self._failed.exists():
                    time.sleep(0.01)
                time.sleep(1.0)
            end_step(progress)

        self.snapshots.step_end = late  # type: ignore[method-assign,assignment]

    def train_to_the_failure(self) -> None:
        try:
            self.train(3, fails=1)
        except Exception as error:
            self._failed.touch()
            print(self.snapshots.emergency(error), *(event.message for event in self.events), flush=True)


dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}/store", rank=RANK, world_size=2, timeout=timedelta(seconds=120)
)
run = Late(Path(sys.argv[1]))
run.resume()
run.train_to_the_failure()
os._exit(0)
