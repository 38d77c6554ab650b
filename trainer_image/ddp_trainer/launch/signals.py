"""The request to stop, as process 1 gets it: SIGTERM from the kubelet, SIGINT from a terminal."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from types import FrameType


class StopSignals:
    """Records when the first of them came, and wakes a selector; so does the end of a child.

    Process 1 of a container ignores a signal that it has no handler for, so this is made before anything else.
    """

    def __init__(self) -> None:
        self.requested_at: float | None = None
        """Monotonic seconds. Only the first counts: ranks that are saving are not disturbed by a second."""
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        return self._read.fileno()

    def clear(self) -> None:
        """Forget the wake-ups so far; the request stays."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.requested_at is None:
            self.requested_at = time.monotonic()
