"""How a gloo group is left, so that no collective of it waits for another rank any more (torch 2.13).

`abort()` wakes no collective that waits for a rank which is alive but has left: it waits for its timeout. A receive
that times out does: gloo then closes all connections of its group, so that their collectives fail, here and on the
peers.

The end of a connection does not wake everything, either. While a connection has a message for a collective that has
failed meanwhile, gloo does not read on from it, not even its end: closing it here wakes the others that wait on it. A
collective whose only message is half received, or not sent at all, is not woken: wait for one by `waited`, where that
is possible; elsewhere `Stuck` ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from ddp_trainer.rank.storage_waits import awaits_storage

UNUSED_TAG: Final = 0x6C656674
"""Of messages that nobody sends."""
LOOK: Final = timedelta(milliseconds=200)
STUCK_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 0.05
"""Of a processor; Python's own threads take turns, and the first look at a collective takes some."""
_COMPILES: Final = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
"""Modules that a thread is in while torch.compile is at work, also on a first backward pass. Of compiled code only CUDA
graphs are run by one of them, and have no collective of a step.
"""
FREED_AT_ONCE: Final = 2
"""Views whose groups are freed when one is left: it takes some 10 ms each, and one more is kept."""


class Connections:
    """Those of the newest groups. `close` may be called from any thread, and as often as wanted."""

    def __init__(self, timeout: timedelta) -> None:
        """`timeout` is that of their collectives."""
        self._timeout = timeout.total_seconds()
        self._groups: tuple[ProcessGroup, ...] = ()
        self._kept: deque[tuple[float, tuple[ProcessGroup, ...]]] = deque()
        """Groups that have lost a rank, and when they were left, the oldest first."""

    def opened(self, group: ProcessGroup) -> None:
        """A group was made."""
        self._groups = (*self._groups, group)

    def close(self) -> None:
        """Make all collectives of the groups fail, under way and to come."""
        for group in self._groups:
            for rank in set(range(group.size())) - {group.rank()}:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, device="cpu")], rank, UNUSED_TAG).wait(timedelta(milliseconds=1))

    def waited(self, work: Work, is_lost: Callable[[], bool]) -> None:
        """Wait for a collective. Raises RuntimeError where it fails, or has not ended although a rank is lost."""
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError as error:
                if work.is_completed():
                    work.wait(LOOK)  # the error may be the timeout of a collective that has ended since
                    return
                if is_lost():
                    raise RuntimeError("Connection closed by peer in the middle of a message") from error

    def destroy(self, *, is_lost: bool) -> None:
        """Close them, and free the groups; where a rank of them is lost, at a later call."""
        self.close()
        now = time.monotonic()
        for _ in range(FREED_AT_ONCE):
            if self._kept and now - self._kept[0][0] >= self._timeout:
                for group in self._kept.popleft()[1]:
                    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        if is_lost:
            # its destructor would wait for a collective that nothing has woken, until that times out; nor may it run
            # before that at the end of the process
            for group in self._groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self._kept.append((now, self._groups))
        self._groups = ()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        # Ranks meet under this number. Only the end of a group resets it, and one that was not formed has none.
        dist.distributed_c10d._world.group_count = 0


class Stuck:
    """Whether the main thread waits for a collective that nothing wakes, although its connections are closed: it does
    not compute, and it does not wait for a volume, for data, or for a compiler.
    """

    def __init__(self) -> None:
        self._thread = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._used = self._since = self._looked_at = 0.0

    def reset(self) -> None:
        """The group is left, or whole."""
        self._since = 0.0

    def look(self) -> bool:
        """To be asked again and again while a rank of the group is lost.

        A process that stood still, or got no processor, has not waited: its main thread may go on right after a look
        that comes first. So no more than half of STUCK_SECONDS counts between two looks.
        """
        used, now = time.clock_gettime(self._clock), time.monotonic()
        waits = awaits_storage(self._thread) or _compiles(self._thread)
        if not self._since or used - self._used > IDLE_SECONDS or waits:
            self._used, self._since = used, now
        else:
            self._since += max(0.0, now - self._looked_at - STUCK_SECONDS / 2)
        self._looked_at = now
        return now - self._since >= STUCK_SECONDS


def _compiles(thread: int) -> bool:
    """Whether this thread runs torch.compile, which waits for compilers in other processes."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") in _COMPILES:
            return True
        frame = frame.f_back
    return False
