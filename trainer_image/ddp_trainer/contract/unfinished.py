"""What a script leaves at work when it returns: its threads, its exit handlers, its processes.

Under plain torchrun Python waits for all of it without a limit, daemons excepted: an upload that a script starts as its
last line is done when the job is. So is it here, as long as it works, which is seen by CPU time, input and output. A
server, which would keep a finished run and its devices for ever, only waits: it is ended.

    HELPER_SECONDS   a process of multiprocessing that is no daemon may be idle
    END_SECONDS      threads and exit handlers may be idle
    WORK_SECONDS     all of it may work

After a failure there is less time: a new attempt waits, and what hangs may wait for a lost peer.

    FAILED_SECONDS   all of it may be idle
    shutdownSeconds  all of it may work, or END_SECONDS if that is less
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_trainer.contract import processes
from ddp_trainer.contract.standard_error import say

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

HELPER_SECONDS = 30.0
END_SECONDS = 300.0
WORK_SECONDS = 7200.0
FAILED_SECONDS = 5.0

STOP_SECONDS = 5.0
"""How long a process may take to end after SIGTERM."""
HELPERS_END_SECONDS = 60.0
"""How long it may take until processes whose time is up have ended, on a busy machine too."""
SAY_SECONDS = 10.0
"""After which time of waiting a line says what is waited for."""
LONGEST_LOOK_SECONDS = 5.0
LOOKS_PER_LIMIT = 4
POLL_SECONDS = 0.05


class Patience:
    """Whether to go on waiting for work: until it was idle for `idle_seconds`, and no longer than WORK_SECONDS and
    `more_seconds`.

    `used` is asked for what it has used so far.
    """

    def __init__(self, used: Callable[[], processes.Usage], idle_seconds: float, *, more_seconds: float = 0.0) -> None:
        self._used, self._idle_seconds, self._more_seconds = used, idle_seconds, more_seconds
        self.look_seconds = min(LONGEST_LOOK_SECONDS, idle_seconds / LOOKS_PER_LIMIT)
        self._began = self._active_at = self._looked_at = time.monotonic()
        self._before = used()

    @property
    def at_work(self) -> bool:
        return time.monotonic() - self._active_at < self._idle_seconds

    def goes_on(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= self.look_seconds:
            used = self._used()
            if processes.is_active(self._before, used, now - self._looked_at):
                self._active_at = now
            self._before, self._looked_at = used, now
        return self.at_work and now - self._began < WORK_SECONDS + self._more_seconds


def of_this_process() -> Patience:
    """For the threads and the exit handlers of this process, and what they started; on the thread that looks.

    An exit handler ends the helpers once their time is up. So this one begins earlier and lasts longer: a process that
    was ended meanwhile would leave them, and its record would not name them.
    """
    return Patience(used_here, END_SECONDS, more_seconds=HELPERS_END_SECONDS)


def after_failure() -> Patience:
    """The same, where the script has failed."""
    return Patience(used_here, FAILED_SECONDS)


def used_here() -> processes.Usage:
    """By this process and those below it, without what looking itself costs the thread that looks."""
    used = processes.usage(os.getpid())
    looking = processes.io_bytes(f"self/task/{threading.get_native_id()}")
    return replace(used, cpu_seconds=used.cpu_seconds - time.thread_time(), io_bytes=used.io_bytes - sum(looking))


def end_helpers() -> str | None:
    """Wait for the processes of multiprocessing, and end those that go on; what was cut off at work, in words.

    Python itself ends daemons by SIGTERM, which they may ignore, and waits for the others.
    """
    from multiprocessing import active_children

    waited_for = [helper for helper in active_children() if not helper.daemon]
    at_work = _await(waited_for)
    left = active_children()
    for helper in left:
        helper.terminate()
    _join(left, STOP_SECONDS)
    deaf = active_children()
    for helper in deaf:
        helper.kill()
    ended = [helper for helper in left if helper in waited_for or helper in deaf]
    if ended:
        say(f"ddp_trainer: the script is done; ended the processes that it left: {_names(ended)}")
    cut = [helper for helper in at_work if helper in left]
    return f"its processes {_names(cut)}, still at work {WORK_SECONDS:g} s after the script" if cut else None


def _await(helpers: Iterable[BaseProcess]) -> list[BaseProcess]:
    """Until each has ended or its time is up; those that were at work then."""
    patience = {helper: Patience(_usage_of(helper), HELPER_SECONDS) for helper in helpers}
    at_work: list[BaseProcess] = []
    said_at = time.monotonic() + SAY_SECONDS
    while patience:
        for helper, its in list(patience.items()):
            helper.join(POLL_SECONDS)
            if helper.exitcode is None and its.goes_on():
                continue
            if helper.exitcode is None and its.at_work:
                at_work.append(helper)
            del patience[helper]
        if patience and time.monotonic() > said_at:
            said_at = float("inf")
            names = _names(patience)
            say(f"ddp_trainer: the script is done; waiting for processes that it started: {names}")
    return at_work


def _usage_of(helper: BaseProcess) -> Callable[[], processes.Usage]:
    return lambda: processes.usage(helper.pid or 0)


def _join(helpers: Iterable[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for helper in helpers:
        helper.join(max(0.0, deadline - time.monotonic()))


def _names(helpers: Iterable[BaseProcess]) -> str:
    return ", ".join(f"{helper.name} ({helper.pid})" for helper in helpers)
