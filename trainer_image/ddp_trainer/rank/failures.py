"""Actions to run when a user's script ends by an exception.

The trainer's own loop runs them in its `except`; a user's loop has none. The exception is seen by what runs the script:
`ddp_trainer.rank.worker` under the launcher, `sys.excepthook` under plain torchrun.

Under the launcher Python never gets to call `sys.excepthook`. What a script, or a library such as one that reports
errors, has put there is called by the worker.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from ddp_trainer.contract.standard_error import say

_GROUPS: Final = "torch.distributed.distributed_c10d"
_LOADERS: Final = "torch.utils.data._utils.signal_handling"
_HYDRA: Final = "hydra._internal.utils"
_actions: list[Callable[[Exception], None]] = []
_replaced: list[Callable[[type[BaseException], BaseException, TracebackType | None], Any]] = []
"""The hook that was there before ours."""


def on_failure(action: Callable[[Exception], None]) -> None:
    """Call `action` with the exception that ends this process, before it does. Not for SystemExit and its kind."""
    if not _replaced and "ddp_trainer.rank.worker" not in sys.modules:
        _replaced.append(sys.excepthook)
        sys.excepthook = _hook
    _actions.append(action)


def not_on_failure(action: Callable[[Exception], None]) -> None:
    """Take it back: what it would save is saved, and what it holds, such as a model, may go."""
    with suppress(ValueError):
        _actions.remove(action)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _replaced[0](kind, error, trace)
    failed(error)


def behind_exit(error: BaseException) -> BaseException:
    """The exception that ends a script, where Hydra has caught it: it prints it, and leaves by `sys.exit(1)` in the
    handler. That exit would say nothing of the cause, and no action would run.
    """
    caught, frames = error.__context__, error.__traceback__
    if not isinstance(error, SystemExit) or not isinstance(caught, Exception):
        return error
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    is_hydras = frames is not None and frames.tb_frame.f_globals.get("__name__") == _HYDRA
    return caught if is_hydras else error


def failed(error: BaseException) -> None:
    """Run the actions, once. An action that fails itself is reported and skipped."""
    _let_workers_end()
    while _actions:
        action = _actions.pop()
        if isinstance(error, Exception):
            try:
                action(error)
            except Exception as problem:
                say(f"ddp_trainer: {type(problem).__name__} after the failure: {problem}")


def _let_workers_end() -> None:
    """torch's data loader raises where a worker ends, in the middle of whatever this process does: of a snapshot, after
    plain torchrun has sent SIGTERM to all processes of a rank. From now on nobody waits for a batch.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", None) == _LOADERS:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def call_hook(error: BaseException) -> None:
    """Let what the script has put in the place of `sys.excepthook` see `error`. Whatever that does, this returns."""
    hook = _of_script(sys.excepthook)
    if hook is sys.__excepthook__ or not callable(hook):
        return
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit:
        pass  # the exit code is settled
    except BaseException as problem:
        say("Error in sys.excepthook:\n" + "".join(traceback.format_exception(problem)).rstrip("\n"))


def _of_script(hook: Any) -> Any:
    """What was there before torch, which at each process group puts its own around it to add the number of the rank."""
    while getattr(hook, "__module__", None) == _GROUPS:
        code, cells = hook.__code__, hook.__closure__ or ()
        hook = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)).get("old_hook")
    return hook
