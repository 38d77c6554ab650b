"""One thread, one save at a time, behind training's back.

Hashing, writing and fsync all release the interpreter's lock, so training goes on beside them. The
outcome, errors included, is kept for the training thread to collect; nothing is ever raised into training from here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddp_trainer.snapshots.trust.manifest import Manifest

PATIENCE_SECONDS = 1.0
"""A save in flight for less than this is waited for when the next is due; a slower one makes the next be skipped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended. `error` is None if it went well, and on rank 0 `manifest` is then what was saved.

    `seconds` is the time the thread took.
    """

    step: int
    seconds: float
    stall_seconds: float
    manifest: Manifest | None = None
    error: Exception | None = None


class BackgroundWriter:
    """Runs one save at a time. All methods belong to the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._started = 0.0

    @property
    def busy(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """How long the save in flight has taken so far; 0 when there is none."""
        return time.monotonic() - self._started if self.busy else 0.0

    def start(self, step: int, stall_seconds: float, save: Callable[[], Manifest | None]) -> None:
        """Begin `save` in a thread. The one before must be over and its outcome taken."""
        if self._thread is not None:
            raise RuntimeError("a save is in flight or its outcome was not taken")
        self._started = time.monotonic()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(step, stall_seconds, save), name=f"snapshot-{step}", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait for the save in flight; False if it is still not over after `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.busy

    def take(self) -> Outcome | None:
        """The outcome of a save that is over, once; None while there is none."""
        if self._thread is None or self.busy:
            return None
        outcome, self._outcome, self._thread = self._outcome, None, None
        return outcome

    def _run(self, step: int, stall_seconds: float, save: Callable[[], Manifest | None]) -> None:
        manifest, problem = None, None
        try:
            manifest = save()
        except Exception as error:
            problem = error
        self._outcome = Outcome(step, time.monotonic() - self._started, stall_seconds, manifest, problem)
