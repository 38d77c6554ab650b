"""A forked launcher forks its agent, and the agent its ranks, with torch imported: each is the child of the one that
starts it, as if it had been executed.

Environment, folder, descriptors, session and signals are those that were asked for, and what was imported since the
server began is forgotten. What such a process does first otherwise, import torch, it need not.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import _bootstrap  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

MODULES = ("ddp_trainer.launch", "ddp_trainer.rank.agent", "ddp_trainer.rank.worker")
"""Of which a forked process runs a copy of itself; everything else is executed, but for this script."""
CONTAINER = str(Path("ddpjob_operator", "local", "container.py"))
STREAMS = ((0, "r", -1), (1, "w", 1), (2, "w", 1))

_execute: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_replace: Callable[..., NoReturn] = os.execvp
_imported: frozenset[str] = frozenset()
_path: list[str] = []
_exit_handlers: list[Callable[..., Any]] = []
_forgotten: list[object] = []
"""Of the process that this one is a copy of. Nothing is destroyed: what it has yet to write is not written twice."""


def fork_children() -> None:
    """From now on, in this process and those that it forks."""
    global _imported
    _imported = frozenset(sys.modules)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # of what the server imports
    _path[:] = [folder for folder in sys.path[1:] if folder not in own]
    subprocess._fork_exec = _start  # type: ignore[attr-defined]
    os.execvp = _become  # type: ignore[assignment]
    register = atexit.register

    def recorded(handler: Callable[..., Any], *args: Any, **named: Any) -> Callable[..., Any]:
        _exit_handlers.append(handler)
        return register(handler, *args, **named)

    atexit.register = recorded  # type: ignore[assignment]


def _start(arguments: Sequence[str], *how: Any) -> int:
    """What subprocess calls; returns the pid of the new process."""
    words = _in_a_copy(arguments)
    if words is None:
        return _execute(arguments, *how)
    _, _, kept, folder, environment, stdin, _, _, stdout, _, stderr, _, errors, _, new_session, *_ = how
    pid = os.fork()
    if pid == 0:
        if new_session:
            os.setsid()
        copies = [os.dup(stream) if stream != -1 else target for target, stream in enumerate((stdin, stdout, stderr))]
        for target, copy in enumerate(copies):
            os.dup2(copy, target)
        if folder is not None:
            os.chdir(folder)
        if environment is not None:
            os.environb.clear()
            os.environb.update(entry.split(b"=", 1) for entry in environment)
        _run_to_the_end(words, kept={*kept} - {errors})
    return pid


def _become(program: str, arguments: Sequence[str]) -> NoReturn:
    """What container.py calls in its child, which is a copy already."""
    words = _in_a_copy(arguments)
    if words is None:
        _replace(program, arguments)
    _run_to_the_end(words, kept=set())


def _in_a_copy(arguments: Sequence[str]) -> list[str] | None:
    """The arguments of Python, if they are to be run so."""
    program, *words = (os.fsdecode(word) for word in arguments)
    words = words[1:] if words[:1] == ["-u"] else words
    if program != sys.executable:
        return None
    if words[:2] == ["-I", "-S"] and words[2].endswith(CONTAINER):
        return words[2:]
    return words if words[:1] == ["-m"] and words[1] in MODULES else None


def _run_to_the_end(words: Sequence[str], kept: set[int]) -> NoReturn:
    """Run the module as a new process would, with no descriptors but these and the standard streams."""
    _close_all_but(kept | {0, 1, 2})

    def as_new() -> None:
        _forget()
        run(words)

    end_after(as_new)


def end_after(program: Callable[[], None]) -> NoReturn:
    """End as Python does with what `program` returns or raises, but leave all objects as they are: to destroy those of
    torch's modules writes to each page of memory that is shared with the server, and takes longer than most programs.
    """
    try:
        program()
    except BaseException as error:
        code = _exit_code(error)
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    """Numbers of pipes stay in use, for nothing: an agent's store is libuv's, which closes the two of its own pipe in
    each process that is forked from one that is forked, and opens others, whatever they are by then.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - kept - {nothing}:
        with contextlib.suppress(OSError):  # the one that has read this folder
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.dup2(nothing, descriptor, inheritable=False)
            else:
                os.close(descriptor)
    os.close(nothing)


def _forget() -> None:
    """The state of the process that this one is a copy of: signals, modules, exit handlers, standard streams."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    while _exit_handlers:
        atexit.unregister(_exit_handlers.pop())
    # a lock that another thread held while this process was forked has nobody to release it
    _bootstrap._module_locks.clear()  # type: ignore[attr-defined]
    _bootstrap._blocking_on.clear()  # type: ignore[attr-defined]
    _forgotten.extend(sys.modules.pop(name) for name in {*sys.modules} - _imported)
    _forgotten.extend((sys.stdin, sys.stdout, sys.stderr))
    new: list[Any] = [open(target, mode, buffering, closefd=False) for target, mode, buffering in STREAMS]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = new  # type: ignore[misc]
    gc.freeze()


def run(command: Sequence[str]) -> None:
    """As `python -m MODULE …` or `python SCRIPT …` does."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    module = command[0] == "-m"
    sys.argv = list(command[1:] if module else command)
    first = str(Path.cwd()) if module else str(Path(command[0]).resolve().parent)
    sys.path[:] = [first, *folders, *_path]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _exit_code(error: BaseException) -> int:
    """As Python ends with it; negative for a signal."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
