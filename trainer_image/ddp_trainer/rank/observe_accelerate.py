"""Hugging Face Accelerate: the values that an untouched script logs with `Accelerator.log`, with or without a tracker.

Steps, loss, samples and validation are what torch's hooks see of the script's own loop. Its total is not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ddp_trainer.rank.observe_transformers import Observer, scalars


def with_report(observer: Observer) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of `Accelerator.log` that reports to `observer` what is logged."""

    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        def log(accelerator: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(values, Mapping):
                with contextlib.suppress(Exception):  # names and values may be of any kind
                    logged = scalars(values)
                    epoch = logged.pop("epoch", None)
                    if epoch is not None:
                        observer.epoch = int(epoch)
                    observer.measured({name: value for name, value in logged.items() if name != "step"})
            return function(accelerator, values, *args, **kwargs)

        return log

    return wrapper
