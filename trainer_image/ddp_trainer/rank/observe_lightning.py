"""Lightning's Trainer: total steps, epoch, validation and logged metrics of an untouched script.

Every Trainer asks `_load_external_callbacks` for the callbacks that installed packages bring along (Lightning, "Extend
Lightning: external callbacks"); ours is added to them. Steps, loss and samples are what torch's hooks see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddp_trainer.rank.observe_transformers import Observer, scalars
from ddp_trainer.rank.optimizer_steps import steps_of

MODULES = (
    "lightning.pytorch.trainer.connectors.callback_connector",
    "pytorch_lightning.trainer.connectors.callback_connector",
)
"""Where a Trainer collects its callbacks, under both names of the package."""

LOADER = "_load_external_callbacks"


def with_report(connector: ModuleType, observer: Observer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of `connector._load_external_callbacks` that adds a callback which reports to `observer`."""
    base: Any = connector.Callback

    class Report(base):  # type: ignore[misc,unused-ignore]
        def __reduce__(self) -> tuple[type, tuple[()]]:
            return base, ()  # as ddp_spawn pickles a Trainer: another process has no observer

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            step = _finished_steps(trainer)
            observer.begins(step=step, total_steps=_total_steps(trainer, step))

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            observer.epoch = trainer.current_epoch

        def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if not trainer.sanity_checking:
                observer.validates()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                observer.measured(scalars(trainer.callback_metrics))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            observer.ends(epochs=trainer.current_epoch)
            observer.measured(scalars(trainer.callback_metrics))

    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> list[Any]:
            return [*function(*args, **kwargs), Report()]

        return load

    return wrapper


def _finished_steps(trainer: Any) -> int:
    """Before this training. With several optimizers, as of a GAN, Lightning counts the steps of all of them. Here they
    are those of the one with most; where they do not count, as SGD, the batches, of which each has a step of it.
    """
    if len(trainer.optimizers) < 2 or not trainer.global_step:
        return int(trainer.global_step)
    counted = [steps_of(optimizer) or 0 for optimizer in trainer.optimizers]
    return max(counted) or int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def _total_steps(trainer: Any, step: int) -> int | None:
    """None where it is not known. Lightning's own is of epochs of this run; those of the checkpoint had other steps
    where there were other ranks. A bound of steps is one for all optimizers together.
    """
    if len(trainer.optimizers) > 1 and trainer.max_steps != -1:
        return None
    total = trainer.estimated_stepping_batches  # inf without an end, -1 where the data has no length
    if not math.isfinite(total) or total <= 0:
        return None
    epochs, done = trainer.max_epochs or -1, trainer.current_epoch
    if trainer.max_steps == -1 and epochs > 0:
        steps = total // epochs
        if not done * steps <= step <= (done + 1) * steps:
            total = step + (epochs - done) * steps
    return int(total)
