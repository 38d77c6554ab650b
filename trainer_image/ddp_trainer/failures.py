"""What is still to be done when a script of the user's own ends by an exception.

A loop of our own does it in its `except`; a loop of the user's has none. The exception is seen by whatever runs the
script: `ddp_trainer.worker` under the launcher, `sys.excepthook` under plain torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

_actions: list[Callable[[Exception], None]] = []


def on_failure(action: Callable[[Exception], None]) -> None:
    """Call `action` with the exception that ends this process, before it does. Not for SystemExit and its kind."""
    if not _actions and "ddp_trainer.worker" not in sys.modules:
        told = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            told(kind, error, trace)
            failed(error)

        sys.excepthook = hook
    _actions.append(action)


def failed(error: BaseException) -> None:
    """Do what is to be done, once. An action that fails itself is told and passed over."""
    while _actions:
        action = _actions.pop()
        if isinstance(error, Exception):
            try:
                action(error)
            except Exception as problem:
                print(
                    f"ddp_trainer: {type(problem).__name__} after the failure: {problem}", file=sys.stderr, flush=True
                )
