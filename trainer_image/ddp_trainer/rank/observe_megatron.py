"""Megatron-LM: the backward passes of an untouched script, which torch's own functions do not see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"


class Observer(Protocol):
    """What is reported to (`observe.ScriptObserver`)."""

    passes: int

    def pass_begins(self) -> None: ...
    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None: ...
    def or_give_up(self, look: Callable[..., None], *arguments: Any) -> None: ...


def hook_into(observer: Observer) -> None:
    """See the backward passes for which Megatron-LM calls the autograd engine itself: without them, micro-batches
    of a step look like a validation. What a pass is made on may be scaled, the sum over all tokens, or the output
    of a stage, and ranks of one model read the same samples.
    """
    schedules = sys.modules[SCHEDULES]

    def pass_seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            observer.passes += 1
            observer.or_give_up(observer.pass_begins)
            return function(*args, **kwargs)

        return backward

    if hasattr(schedules, "custom_backward"):
        observer.wrap(schedules, "custom_backward", pass_seen)
