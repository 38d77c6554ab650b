"""How a process ends once its result is settled: exit handlers run, files are written out, the kernel does the rest.

Python's own way goes on to take every library apart. Threads that torch (gloo) and obstore started in C++ still run
then, and one that needs the interpreter for a last object is ended in the middle of C++, which calls `abort`
(https://github.com/python/cpython/issues/87135): `terminate called without an active exception`, SIGABRT, after the
work was done. The exit code must not depend on that race.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ddp_trainer.contract import open_files, unfinished
from ddp_trainer.contract.exit_codes import EXIT_OK
from ddp_trainer.contract.standard_error import flush_streams, say

LEAVE_SECONDS: Final = 5.0
"""How long process groups may take to be destroyed at the end: with NCCL that waits for the device."""

GLOO_THREADS: Final = "pt_gloo_runloop"
LOOK_SECONDS: Final = 0.01

OnCut = Callable[[str], None]

_exit: Final = os._exit
"""The worker puts a function of its own in the place of `os._exit`."""
_code: int | None = None
_owner: int | None = None
"""The pid of the process that this is about. One that it forks ends as under Python alone."""
_on_cut: OnCut | None = None
_destroying = threading.Event()
_destroyed = threading.Event()
_ending = threading.Lock()
"""The thread that holds it ends the process, and has files closed only once."""


def end_after_exit_handlers() -> None:
    """From now on a process whose exit code is settled ends after its exit handlers, and before it is taken apart.

    Call it before anything else registers an exit handler: the first that is registered is the last to run.
    """
    global _owner
    _owner = os.getpid()
    atexit.register(_end)


def end_helpers_at_exit() -> None:
    """From now on no process that the script starts with multiprocessing keeps a finished run alive (`unfinished`).

    Call it next, before the script: its own exit handlers, which may still need their helpers, then run first.
    """
    import multiprocessing.util  # noqa: F401 - registers the exit handler that waits

    atexit.register(_end_helpers)


def settle(code: int, on_cut: OnCut | None = None) -> int:
    """The process ends with `code`, whatever happens while it ends; returns `code`, for `sys.exit`.

    `on_cut` gets in words what was ended although it may not have been done, just before.
    """
    global _code, _on_cut
    if os.getpid() != _owner:
        return code
    _code = code
    _on_cut = on_cut
    if code == EXIT_OK:
        threading.Thread(target=_end_anyway, name="end anyway", daemon=True).start()
    if code == EXIT_OK and _has_process_groups():
        # now: Python 3.12 starts no thread any more once exit handlers run
        threading.Thread(target=_end_late, name="end", daemon=True).start()
    open_files.write_out(is_last=False)  # this process may be ended before its exit handlers are done
    return code


def end_failed(code: int, seconds: float) -> None:
    """From now on this process, whose script has failed, is ended with `code` when its exit handlers and threads are
    idle for `unfinished.FAILED_SECONDS`, and when they have worked for `seconds`, or for END_SECONDS if that is less.
    Call it on the main thread.

    The kernel ends it where what hangs lets no other thread run.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _put_off_alarm()
    limit = max(unfinished.FAILED_SECONDS, min(seconds, unfinished.END_SECONDS))
    # daemon: Python waits for the others
    threading.Thread(target=_end_failed, args=(code, limit), name="end failed", daemon=True).start()


def _put_off_alarm() -> None:
    signal.alarm(math.ceil(2 * unfinished.FAILED_SECONDS))


def restore_stderr() -> None:
    """What follows a script is written there, though the script may have closed it or put something else in its place
    that it has closed. The descriptor is open: Python never closes that of a standard stream.
    """
    try:
        sys.stderr.flush()
    except Exception:  # whatever the script has put there; None for a stream that Python could not open
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - a descriptor


def await_gloo() -> None:
    """Wait, LEAVE_SECONDS at most, until gloo's threads have let go of the tensors of their last collectives.

    For a script that runs under plain torchrun, whose exit code is not known before the interpreter is gone: as an exit
    handler. A thread that is idle sleeps; one that still has a tensor to let go of runs, or waits for a processor, as
    soon as this thread has released the interpreter.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    idle = 0
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        idle = idle + 1 if all(state == "S" for state in _thread_states(GLOO_THREADS)) else 0


def _thread_states(name: str) -> Iterator[str]:
    """The kernel's letter (proc_pid_stat(5)) for each thread of this process with that name; none without /proc."""
    for task in Path("/proc/self/task").glob("*"):
        try:
            found, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        if found == name[:15]:
            yield rest.split()[0]


def _end_helpers() -> None:
    if os.getpid() != _owner:
        return
    import multiprocessing.util

    # as Python's own handler begins: a pool that ends its processes itself does not wait for what one of them held
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    cut = unfinished.end_helpers()
    if cut is not None and _on_cut is not None:
        _on_cut(cut)


def _end() -> None:
    if _code is None or os.getpid() != _owner:
        return
    if _code == EXIT_OK and _has_process_groups():
        _destroying.set()
        _destroy_process_groups()
        _destroyed.set()
    _ending.acquire()
    open_files.write_out(is_last=True)
    _flush()
    _exit(_code)


def _end_late() -> None:
    _destroying.wait()
    if _destroyed.wait(LEAVE_SECONDS):
        return
    _ending.acquire()
    open_files.write_out(is_last=True)
    _flush()
    _exit(EXIT_OK)


def _end_anyway() -> None:
    began = time.monotonic()
    patience = unfinished.of_this_process()
    while patience.goes_on():
        time.sleep(patience.look_seconds)
    others = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
    state = "still at work" if patience.at_work else "idle"
    cut = f"its process, {state} {time.monotonic() - began:.0f} s after the script, with the threads {others}"
    say(f"ddp_trainer: the script is done; ending {cut}")
    if _on_cut is not None:
        _on_cut(cut)
    _flush()
    _exit(EXIT_OK)


def _end_failed(code: int, seconds: float) -> None:
    began = time.monotonic()
    patience, waited, has_said = unfinished.after_failure(), 0.0, False
    while patience.goes_on() and waited < seconds:
        if waited > unfinished.FAILED_SECONDS and not has_said:
            has_said = True
            say(f"ddp_trainer: the script has failed; what it left at work may go on for {seconds - waited:.0f} s more")
        _put_off_alarm()
        time.sleep(patience.look_seconds)
        waited = time.monotonic() - began
    others = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
    state = "still at work" if patience.at_work else "idle"
    say(
        f"ddp_trainer: the script has failed; cutting its exit handlers and threads ({others}), {state} {waited:.0f} s "
        "after it"
    )
    _flush()
    _exit(code)


def _has_process_groups() -> bool:
    """Whether the script left torch's process groups as they are; asked without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _destroy_process_groups() -> None:
    """What is still queued reaches the other ranks. The script's result stands, whatever this says."""
    try:
        sys.modules["torch.distributed"].destroy_process_group()
    except Exception as error:
        say(f"ddp_trainer: process groups are left as they are: {error}")


def _flush() -> None:
    flush_streams()
    ctypes.CDLL(None).fflush(None)
