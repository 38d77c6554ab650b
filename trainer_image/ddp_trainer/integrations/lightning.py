"""Lightning's Trainer: verified checkpoints, a stop that saves first, and the exit code of a preempted rank.

    from ddp_trainer.integrations.lightning import DDPJobCallback

    callback = DDPJobCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.fit(model, ckpt_path=callback.latest())

It saves as often as `spec.snapshots.every`. A checkpoint in the middle of an epoch resumes there; like all of
Lightning's, it begins the epoch's data anew unless the data loader has a state of its own.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from ddp_trainer.client.attach import attach
from ddp_trainer.client.run import Run
from ddp_trainer.contract.environment import parse_rank
from ddp_trainer.contract.exit_codes import Preempted

FILE: Final = "lightning.ckpt"


class DDPJobCallback(Callback):  # type: ignore[misc]
    """Under torchrun, `latest` starts the process group as Lightning would, which then uses it."""

    def __init__(self) -> None:
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """The run of this process, for `log` and the like."""
        if self._run is None:
            _join()
            self._run = attach()
            self._run.resume()
        return self._run

    def latest(self) -> str | None:
        """The newest checkpoint that verifies, as `ckpt_path` takes it; None for a new run."""
        folder = self.run.latest()
        return None if folder is None else str(folder / FILE)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on after `trainer.global_step`."""
        self.run.step = trainer.global_step
        # Lightning's own handler of SIGTERM broadcasts in the middle of whatever the rank is doing.
        self.run.listen()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save and stop where the job asks for it, after a batch that was a step."""
        if trainer.global_step <= self.run.step:
            return
        self.run.step = trainer.global_step - 1  # several optimizers make several of Lightning's steps
        self.run.step_end(epoch_end=bool(trainer.is_last_batch))
        if not trainer.is_last_batch:
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """What was due after the last batch, now that the epoch is over."""
        self._save_if_due(trainer)

    def _save_if_due(self, trainer: Any) -> None:
        if self.run.should_save():
            with self.run.checkpoint() as folder:
                trainer.save_checkpoint(folder / FILE)
        if self.run.should_stop():
            raise Preempted(f"asked to stop; the checkpoint of step {self.run.step} is saved")


def _join() -> None:
    """Start the process group of torchrun's ranks, on the devices that Lightning gives them."""
    own = parse_rank(os.environ)
    if own.world_size == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(own.local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
