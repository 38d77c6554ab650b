"""Actions to run when a user's script ends by an exception.

The trainer's own loop runs them in its `except`; a user's loop has none. The exception is seen by what runs the script:
`ddp_trainer.rank.worker` under the launcher, `sys.excepthook` under plain torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from ddp_trainer.contract.standard_error import say

_actions: list[Callable[[Exception], None]] = []


def on_failure(action: Callable[[Exception], None]) -> None:
    """Call `action` with the exception that ends this process, before it does. Not for SystemExit and its kind."""
    if not _actions and "ddp_trainer.rank.worker" not in sys.modules:
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous(kind, error, trace)
            failed(error)

        sys.excepthook = hook
    _actions.append(action)


def failed(error: BaseException) -> None:
    """Run the actions, once. An action that fails itself is reported and skipped."""
    while _actions:
        action = _actions.pop()
        if isinstance(error, Exception):
            try:
                action(error)
            except Exception as problem:
                say(f"ddp_trainer: {type(problem).__name__} after the failure: {problem}")
