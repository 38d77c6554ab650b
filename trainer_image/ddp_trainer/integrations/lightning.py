"""Lightning's Trainer: verified checkpoints, a stop that saves first, and the exit code of a preempted rank.

    from ddp_trainer.integrations.lightning import DDPJobCallback

    callback = DDPJobCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.fit(model, ckpt_path=callback.latest())

With `plugins=[callback.checkpoint_io]` what Lightning saves of its own accord, such as a ModelCheckpoint, is taken over
into the job's checkpoints too. It saves as often as `spec.snapshots.every`. A checkpoint in the middle of an epoch
resumes there; like all of Lightning's, it begins the epoch's data anew unless the data loader has a state of its own.
Beside Lightning's file, which has no random number generators, are those of each rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from ddp_trainer.client.attach import attach
from ddp_trainer.client.run import Run
from ddp_trainer.contract.environment import parse_rank
from ddp_trainer.contract.exit_codes import Preempted
from ddp_trainer.snapshots.codec import rng

FILE: Final = "lightning.ckpt"
PLATEAUS: Final = "ddpjob_plateaus"
"""In Lightning's file, what the schedulers that follow a metric are given after it is written (`_plateaus_of`)."""


class DDPJobCallback(Callback):  # type: ignore[misc]
    """Under torchrun, `latest` starts the process group as Lightning would, which then uses it."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._io = _NotedIO()
        self._noted: int | None = None
        """The step of what Lightning has saved, and is not taken over yet."""
        self._saved: set[int] = set()
        """Steps that have a checkpoint."""
        self._saving = False
        self._at_end = _AtEnd(self._save_if_due, self._validated)
        self._is_before_validation = False
        """Whether a validation follows the last step, and the save that is due after both."""
        self._is_in_epoch = False
        """Whether the last step did not end one, as far as was known then."""
        self._generators: Tensor | None = None
        """This rank's, when Lightning has saved last."""
        self._plateaus: dict[str, Any] | None = None
        """Of the checkpoint, until training begins."""
        self._resumed_from: Path | None = None
        """The checkpoint, if it has generators, until an epoch begins or ends."""

    @property
    def run(self) -> Run:
        """The run of this process, for `log` and the like."""
        if self._run is None:
            _join()
            self._run = attach()
            self._run.resume()
        return self._run

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that has Lightning's own checkpoints taken over."""
        return self._io

    def latest(self) -> str | None:
        """The newest checkpoint that verifies, as `ckpt_path` takes it; None for a new run."""
        folder = self.run.latest()
        return None if folder is None else str(folder / FILE)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Come after the callbacks that change with a step, such as an average of the weights, wherever this one was
        listed: a checkpoint has what all of them made of its step. Lightning puts its own that save at the end.
        """
        others = [callback for callback in trainer.callbacks if callback not in (self, self._at_end)]
        place = next((at for at, callback in enumerate(others) if isinstance(callback, Checkpoint)), len(others))
        trainer.callbacks = [*others[:place], self, *others[place:]]
        if stage == "fit":
            trainer.callbacks.append(self._at_end)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the callbacks that were given."""
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self._at_end]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Also of a training that is at its end already."""
        self.run.training_begins()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on after `trainer.global_step`."""
        self.run.step = trainer.global_step
        # Lightning's own handler of SIGTERM broadcasts in the middle of whatever the rank is doing.
        self.run.listen()
        path = Path(trainer.ckpt_path or "")
        # an earlier version has saved without them, and so has Lightning elsewhere
        has_generators = path.name == FILE and _generators_of(path.parent, 0).is_file()
        self._resumed_from = path.parent if has_generators else None
        self._restore_generators(trainer)
        plateaus, self._plateaus = self._plateaus, None
        if plateaus is None or not trainer.ckpt_path:  # another one was loaded, as to validate
            return
        # after a validation in an epoch, Lightning gives the metric to its scheduler itself when it resumes
        trainer.callback_metrics.update(plateaus["metrics"])
        _step_plateaus(trainer, plateaus)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """After a resume, begin the epoch as the unbroken run did: Lightning has an iterator of its data already, which
        it made before `on_train_start`, with what the generators drew then.
        """
        if self._resumed_from is None:
            return
        self._restore_generators(trainer)
        self._resumed_from = None
        loop = trainer.fit_loop
        fetcher = loop._data_fetcher
        # up to Lightning 2.5 the loop begins again by itself right after this
        begins = trainer.current_epoch > 0 and not getattr(loop, "is_resuming", False)
        begins = begins and not loop.epoch_loop.restarting
        # a loader with a state of its own may go on from it in its first iterator alone
        if not begins and not any(hasattr(loader, "load_state_dict") for loader in fetcher.combined_loader.flattened):
            iter(fetcher)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Lightning saves, on all ranks; the file is there once rank 0 has written it."""
        self._generators = rng.capture()
        checkpoint[PLATEAUS] = _plateaus_of(trainer)
        if not self._saving and trainer.strategy.checkpoint_io is self._io:
            self._noted = trainer.global_step

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Training goes on from this file."""
        self._plateaus = checkpoint.get(PLATEAUS)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take over what a ModelCheckpoint has saved after the batch before."""
        self._take_over(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """And after the last one."""
        self._take_over(trainer)
        self.run.training_ends()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save and stop where the job asks for it, after a batch that was a step."""
        self._is_before_validation = False
        if trainer.global_step <= self.run.step:
            return
        self.run.step = trainer.global_step - 1  # several optimizers make several of Lightning's steps
        self.run.step_end(epoch_end=bool(trainer.is_last_batch))
        self._is_in_epoch = not trainer.is_last_batch
        self._is_before_validation = self._at_end in trainer.callbacks and _validates_now(trainer)
        if self._is_in_epoch and not self._is_before_validation:
            self._save_if_due(trainer)

    def _validated(self, trainer: Any) -> None:
        """A checkpoint from before the validation has Lightning resume after it, so that no attempt would make it."""
        is_due, self._is_before_validation = self._is_before_validation and self._is_in_epoch, False
        if is_due:
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The epoch is over; what was due after the last batch is saved `_AtEnd` of it."""
        self._resumed_from = None
        if self._is_in_epoch and trainer.is_last_batch:  # a batch without a step, as where gradients accumulate
            self._is_in_epoch = False
            self.run.epoch_ends()
        if self._at_end not in trainer.callbacks:  # such as where a subclass has a setup() of its own
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: Any) -> None:
        self._take_over(trainer)
        if self.run.should_save() and self.run.step not in self._saved:
            self._save(trainer, self.run.step, None)
        if self.run.should_stop():
            raise Preempted(f"asked to stop; the checkpoint of step {self.run.step} is saved")

    def _take_over(self, trainer: Any) -> None:
        step, self._noted = self._noted, None
        if step is None or step in self._saved:
            return
        found = trainer.strategy.broadcast(str(self._io.path) if self._io.path and self._io.path.is_file() else None)
        self._save(trainer, step, found)

    def _save(self, trainer: Any, step: int, found: str | None) -> None:
        """A checkpoint of what Lightning has saved as `found`, or else of what it saves now."""
        self._saving = True
        try:
            with self.run.checkpoint(step) as folder:
                if found is None:
                    trainer.save_checkpoint(folder / FILE)
                elif trainer.is_global_zero:
                    shutil.copyfile(found, folder / FILE)
                assert self._generators is not None
                _generators_of(folder, trainer.global_rank).write_bytes(bytes(self._generators.numpy()))
        finally:
            self._saving = False
        self._saved.add(step)

    def _restore_generators(self, trainer: Any) -> None:
        """Those of the checkpoint that training goes on from."""
        folder, rank, world_size = self._resumed_from, trainer.global_rank, trainer.world_size
        if folder is None:
            return
        if _generators_of(folder, world_size - 1).is_file() and not _generators_of(folder, world_size).is_file():
            rng.restore(_read(_generators_of(folder, rank)))
        else:  # as with our snapshots
            first = _read(_generators_of(folder, 0))
            rng.reseed(first, step=trainer.global_step, rank=rank, world_size=world_size)


class _AtEnd(Checkpoint):  # type: ignore[misc]
    """Saves at the end of an epoch, or of a validation in it, after what Lightning calls there behind all other
    callbacks: the module's own hook, EarlyStopping and ModelCheckpoint. A run of so many epochs resumes with the next
    one, and calls none of them for this one.
    """

    best_model_path = ""
    """As of a ModelCheckpoint that has none: Trainer.checkpoint_callback is this one where there is no other."""

    def __init__(self, save_if_due: Callable[[Any], None], validated: Callable[[Any], None]) -> None:
        self._save_if_due = save_if_due
        self._validated = validated

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._save_if_due(trainer)
        if trainer.fit_loop.restarting:  # resumed in this epoch, at whose end Lightning leaves them out
            _step_plateaus(trainer, _plateaus_of(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.inference_mode(False):  # as where a save follows a step
            self._validated(trainer)


class _NotedIO(TorchCheckpointIO):  # type: ignore[misc]
    """Lightning's own, which notes where it has written a checkpoint last."""

    path: Path | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        if "optimizer_states" in checkpoint:  # not with save_weights_only, from which no training resumes
            self.path = Path(path)


def _validates_now(trainer: Any) -> bool:
    """Whether Lightning validates after this batch. By the time since the last one, ranks may not know that alike yet,
    and the next attempt has another time.
    """
    loop = trainer.fit_loop
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return False
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _plateaus_of(trainer: Any) -> dict[str, Any]:
    """The metrics that schedulers follow, as a ReduceLROnPlateau, and indices of those that are due at the end of this
    epoch: Lightning has them step behind all that may save there, and then not when it resumes.
    """
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    ends = epochs.processed > epochs.completed and loop.epoch_loop._num_ready_batches_reached()
    follow = {index: config for index, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau}
    if not trainer.lightning_module.automatic_optimization:
        follow = {}
    names = {config.monitor for config in follow.values()}
    metrics = {name: value for name, value in trainer.callback_metrics.items() if name in names}
    due = [
        index
        for index, config in follow.items()
        if ends
        and config.interval == "epoch"
        and (trainer.current_epoch + 1) % config.frequency == 0
        and config.monitor in metrics
    ]
    return {"metrics": metrics, "due": due}


def _step_plateaus(trainer: Any, plateaus: dict[str, Any]) -> None:
    for index, config in enumerate(trainer.lr_scheduler_configs):
        if index in plateaus["due"] and config.monitor in plateaus["metrics"]:
            trainer.lightning_module.lr_scheduler_step(config.scheduler, plateaus["metrics"][config.monitor])


def _generators_of(folder: Path, rank: int) -> Path:
    return folder / f"rng-{rank}.bin"


def _read(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _join() -> None:
    """Start the process group of torchrun's ranks, on the devices that Lightning gives them."""
    own = parse_rank(os.environ)
    if own.world_size == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(own.local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
