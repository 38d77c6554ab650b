"""Lightning's Trainer: total steps, epoch, validation and logged metrics of an untouched script.

Every Trainer asks `_load_external_callbacks` for the callbacks that installed packages bring along (Lightning, "Extend
Lightning: external callbacks"); ours is added to them. Steps, loss and samples are what torch's hooks see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from types import ModuleType
from typing import Any

from ddp_trainer.rank.observe_transformers import Observer

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
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            total = trainer.estimated_stepping_batches  # inf without an end, -1 where the data has no length
            is_known = math.isfinite(total) and total > 0
            observer.begins(step=trainer.global_step, total_steps=int(total) if is_known else None)

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


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of `values` that are one number."""
    return {
        name: float(value)
        for name, value in values.items()
        if (isinstance(value, Real) and not isinstance(value, bool)) or getattr(value, "numel", lambda: 0)() == 1
    }
