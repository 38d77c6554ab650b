"""Hugging Face `Trainer`: step, total steps, epoch and evaluation metrics of an untouched script.

Every Trainer gets the callbacks in `transformers.trainer.DEFAULT_CALLBACKS`; ours is added to them. What it knows comes
from the TrainerState (transformers, trainer_callback.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol


class Observer(Protocol):
    """What the callback reports to (`observe.ScriptObserver`)."""

    epoch: int | None
    loss: float | None

    def begins(self, *, step: int, total_steps: int | None) -> None: ...
    def divides_data_among(self, ranks: int) -> None: ...
    def counted(self, step: int) -> None: ...
    def validates(self) -> None: ...
    def ends(self, *, epochs: int) -> None: ...
    def measured(self, metrics: Mapping[str, float]) -> None: ...


def report_to(observer: Observer) -> None:
    """Let every Trainer that is made from now on report to `observer`. `transformers.trainer` has been imported."""
    from transformers import TrainerCallback
    from transformers.trainer import DEFAULT_CALLBACKS

    class Report(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def __reduce__(self) -> tuple[type, tuple[()]]:
            return TrainerCallback, ()  # as Ray pickles a Trainer: another process has no observer

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            observer.begins(step=state.global_step, total_steps=state.max_steps)
            observer.divides_data_among(args.world_size)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            observer.epoch = int(state.epoch or 0)
            observer.counted(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # a Trainer of the script's own may log anything by this name
            observer.loss = scalars(kwargs.get("logs") or {}).get("loss", observer.loss)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            observer.validates()

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            values = scalars(kwargs.get("metrics") or {})
            observer.measured({name: value for name, value in values.items() if name != "epoch"})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            observer.ends(epochs=int(state.epoch or 0))

    callbacks: list[Any] = DEFAULT_CALLBACKS
    callbacks.append(Report)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of `values` that are one number."""
    return {
        name: float(value)
        for name, value in values.items()
        if (isinstance(value, Real) and not isinstance(value, bool)) or getattr(value, "numel", lambda: 0)() == 1
    }
